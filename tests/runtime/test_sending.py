"""What a generating worker sends: the edge's fields, filled in where only other workers write them."""

import threading
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distflow.data.batch import Batch, Column, Ragged
from distflow.errors import StepError
from distflow.flow.edges import Edge
from distflow.runtime.generating import Generating
from distflow.runtime.trace_writer import UNTRACED
from distflow.types import VALIDATION


class Recorder:
    """Stands for the channel, the node and the metrics: keeps what is finished."""

    trace = UNTRACED

    def __init__(self) -> None:
        self.accepted: list[int] = []
        self.sent: list[tuple[Batch, dict[int, str]]] = []
        self.board = SimpleNamespace(condition=threading.Condition())

    def finish(self, batch: Batch, dropped: dict[int, str], now: float) -> None:
        self.sent.append((batch, dropped))

    def work_done(self) -> None: ...

    def accept(self, positions: list[int]) -> None:
        self.accepted += positions

    def add(self, name: str, value: float) -> None: ...

    def timed(self, name: str) -> Any:
        return nullcontext()


def sent_by(edge: Edge, **columns: Column) -> tuple[Batch, dict[int, str]]:
    recorder: Any = Recorder()
    nothing: Any = None
    loop: Any = SimpleNamespace(sent=recorder.accept)
    channels = {"train": recorder, "val": recorder}
    Generating(loop, channels, nothing, nothing, recorder, edge, recorder, nothing).send(Batch(columns))
    return recorder.sent[0]


def send(edge: Edge, **columns: Column) -> Batch:
    return sent_by(edge, **columns)[0]


def edge(*fields: str, **fills: float) -> Edge:
    own = {name.replace("__", "/"): value for name, value in fills.items()}
    return Edge("samples", "lease", "rollout", "trainer", fields, fills=own)


GROUP = torch.tensor([3, 3, 4])


@pytest.mark.parametrize("field", ["rewards/*", "rewards/novelty"])
def test_a_worker_without_the_step_sends_its_fill_value(field: str) -> None:
    sent = send(edge("group", field, rewards__novelty=0.5), group=GROUP, unread=GROUP)
    assert sent.columns.keys() == {"group", "rewards/novelty"}
    assert sent.dense("rewards/novelty").tolist() == [0.5, 0.5, 0.5]


def test_a_worker_with_the_step_sends_what_it_wrote() -> None:
    sent = send(edge("group", "rewards/*", rewards__novelty=0.5), group=GROUP, **{"rewards/novelty": GROUP.float()})
    assert sent.dense("rewards/novelty").tolist() == [3.0, 3.0, 4.0]


@pytest.mark.parametrize(
    ("how", "replaced"),
    [
        ({}, {}),
        ({"compares": True}, {3: "samples left out, reward error", 6: "samples left out, away"}),
        ({"compares": True, "baseline": True}, {3: "samples left out, reward error"}),
    ],
)
def test_a_group_with_fewer_than_two_samples_left_is_replaced_where_they_are_compared(
    how: dict[str, bool], replaced: dict[int, str]
) -> None:
    """In group 3 one is left, and in group 4 two; the only sample of group 5 has nothing to be compared with. Of the
    two that are left in group 6 one is not trained on."""
    out = Ragged.from_texts(["reward error", "", "away", "", "", "reward timeout", "away", "", ""])
    masks = Ragged.from_rows([[not text and row != 8] for row, text in enumerate(out.texts())], torch.bool)
    given = replace(edge("group", "left_out"), **how)
    columns = {"group": torch.tensor([3, 3, 4, 4, 4, 5, 6, 6, 6]), "left_out": out, "response_mask": masks}
    sent, dropped = sent_by(given, **columns)
    assert dropped == replaced
    assert sent.texts("left_out") == out.texts()


def test_samples_of_validation_whose_reward_failed_are_told() -> None:
    reasons = Ragged.from_texts(["reward error", "equal rewards", ""])
    columns = {"group": GROUP + VALIDATION, "left_out": Ragged.from_texts([""] * 3), "drop_reason": reasons}
    sent, dropped = sent_by(edge("group", "left_out"), **columns)
    assert dropped == {}
    assert sent.texts("left_out") == ["reward error", "", ""]


def test_a_field_that_the_script_forgot_is_named() -> None:
    with pytest.raises(
        StepError, match="field 'reward' is read by the training side, but the groups to send have only"
    ):
        send(edge("group", "reward"), group=GROUP)
