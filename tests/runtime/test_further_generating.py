"""A worker that generates with a further model for others: its requests, its engine and its weights, in one thread."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

from distflow.comm.message import Message, decode
from distflow.data.batch import Batch, Ragged
from distflow.errors import NoProgressError
from distflow.exchange.call_messages import CallMessage, CallRequest, CallWithdrawn
from distflow.exchange.facts import BEGINS, OWNERS, TERM
from distflow.exchange.messages import Grant
from distflow.runtime.assembly import build_contexts, build_tokenizer
from distflow.runtime.further_generating import build_further
from distflow.runtime.steps import StepRunner
from distflow.testing.fakes import SHAPES, FakeEngine
from distflow.types import Version
from distflow.weights.in_place import InPlace
from distflow.weights.manifest import Manifest
from distflow.weights.receiver import WeightInbox
from tests.exchange.test_lease_client import lease
from tests.messages.corpus import Example, examples
from tests.messages.receivers import WITH_SOLVER, WorkerReceiver, setting_of
from tests.messages.test_call_drivers import travelling
from tests.messages.test_fuzz import packed

G, TOKENS = 2, 4
FIRST, LOST = Version(0, 4), Version(0, 6)


class Reader:
    """Weights that are there at once."""

    def fetch(self, manifest: Manifest) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, torch.zeros(shape)) for name, shape in SHAPES.items())

    def intact(self, manifest: Manifest) -> bool:
        return True

    def begin_term(self, term: int) -> None:
        pass

    def close(self) -> None:
        pass


def announced(version: Version) -> Manifest:
    return Manifest("solver", version, 0, "", (), ())


def group(position: int) -> Batch:
    return Batch(
        {
            "uid": torch.tensor([[0, position, position]] * G),
            "group": torch.tensor([position] * G),
            "sample": torch.arange(G),
            "solver/prompt_ids": Ragged.from_rows([[1, 2]] * G, torch.int64),
            "solver/prompt_text": Ragged.from_texts(["12"] * G),
            "solver/task": Ragged.from_texts(["{}"] * G),
        }
    )


class Solver:
    """`solver_rollout/0`, whose engine has room for one group."""

    def __init__(self, folder: Path) -> None:
        limits = ["limits.no_progress_s=1", f"flow.steps.solve.with.max_new_tokens={TOKENS}"]
        setting = setting_of("solver_rollout/0", folder, [*WITH_SOLVER, *limits])
        self.receiver = WorkerReceiver(setting)
        self.node, session = self.receiver.node, self.receiver.session
        assert session._serving is not None
        self.answering = session._serving
        tokenizer = build_tokenizer(setting)
        contexts = build_contexts(setting, session._metrics, {}, {}, tokenizer)
        step = StepRunner("solver_rollout/0", setting.me.steps, contexts).generate_step("solve")
        (plan,) = setting.plan.further_generation
        self.engine, self.inbox = FakeEngine(slots=G), WeightInbox(InPlace(Reader()))  # type: ignore[arg-type]
        about = (setting, step, plan, self.engine, self.inbox, tokenizer, self.node, session._metrics)
        self.further = build_further(*about)
        self.further.on_version(self.answering.version)
        self.answering.generates_by(self.further)
        for example in examples("worker"):
            if example.kind == "hello":
                for sender in ("rollout/0", "trainer/0", "trainer/1", "solver_trainer/0"):
                    self.take(Example("worker", "hello", sender, 0, example.body, ()))
        self.groups = self.answering.groups("solve")

    def take(self, message: Example) -> None:
        refused = self.receiver.refused
        self.receiver.take(packed(message), message.payload)
        assert self.receiver.refused == refused

    def hear(self, message: CallMessage, rows: Batch | None = None) -> None:
        self.take(travelling(message, "rollout/0", rows))

    def ask(self, number: int, position: int, version: Version = FIRST) -> None:
        self.hear(CallRequest("solve", number, 7, version, 10, at_least=True), group(position))

    def publish(self, version: Version) -> None:
        with self.node.board.condition:
            self.inbox.announce(announced(version))

    def begin(self) -> None:
        """Take newer weights, and begin what there is room for."""
        assert self.answering._made() is None

    def restart(self, term: int, begins: Mapping[int, int]) -> None:
        with self.node.board.condition:
            self.further.begin_term(term, begins)

    def make(self) -> list[int]:
        """Decode until groups are whole, and answer them; returns the numbers of the requests."""
        groups = next(self.groups)
        versions = groups.ragged("solver/policy_versions").values.tolist()
        assert {Version(term, number) for term, number, _, _ in versions} == {self.inbox.loaded}
        self.receiver.said.clear()
        self.answering.answer(groups)
        return [message.body["number"] for message in self.said("call.answer")]

    def said(self, kind: str) -> list[Message]:
        """What it has said of this kind."""
        said = [decode(bytes(frames[0]), [memoryview(b"") for _ in frames[1:]], b"") for frames in self.receiver.said]
        return [message for message in said if message.kind == kind]


@pytest.fixture
def solver(tmp_path: Path) -> Iterator[Solver]:
    found = Solver(tmp_path)
    found.publish(FIRST)
    found.begin()
    yield found
    found.receiver.close()


def test_groups_are_begun_as_there_is_room_and_answered_when_they_are_whole(solver: Solver) -> None:
    for number in (1, 2, 3):
        solver.ask(number, position=number)
    assert [solver.make(), solver.make(), solver.make()] == [[1], [2], [3]]


def test_newer_weights_are_taken_between_two_tokens_and_told(solver: Solver) -> None:
    solver.ask(1, position=1, version=Version(0, 5))
    assert not solver.answering.asked, "they are not here yet"
    solver.publish(Version(0, 5))
    solver.begin()
    assert solver.node.facts["serves"] == [0, 5]
    solver.ask(1, position=1, version=Version(0, 5))
    assert solver.make() == [1]


def test_who_has_no_room_and_lost_weights_waits_for_newer_ones(solver: Solver) -> None:
    """It does nothing meanwhile; and if none come, it says so."""
    solver.publish(LOST)
    solver.begin()
    for number in (1, 2):
        solver.ask(number, position=number)
    solver.begin()
    solver.restart(1, {1: 5})
    began = time.process_time()
    with pytest.raises(NoProgressError, match="weights of version 5 of 'solver' or newer"):
        next(solver.groups)
    assert time.process_time() - began < 0.5
    solver.groups = solver.answering.groups("solve")
    solver.publish(Version(1, 5))
    assert [solver.make(), solver.make()] == [[1], [2]]


def test_what_is_withdrawn_may_be_asked_for_again_at_once(solver: Solver) -> None:
    """By a caller that was lost and came back, before a token was decoded."""
    solver.ask(1, position=1)
    solver.begin()
    solver.hear(CallWithdrawn((1,)))
    solver.ask(1, position=1)
    assert solver.make() == [1]
    assert not solver.answering.asked, "it was made once"


def test_what_was_begun_for_a_lost_version_takes_no_room(solver: Solver) -> None:
    """Its caller, who may still want it, has it back: that version may never come again."""
    solver.publish(LOST)
    solver.begin()
    solver.ask(1, position=1, version=LOST)
    solver.begin()
    solver.restart(1, {1: 5})
    solver.begin()
    solver.receiver.said.clear()
    solver.publish(Version(1, 5))
    solver.begin()
    assert [message.body["numbers"] for message in solver.said("call.not_yet")] == [[1]]
    solver.ask(2, position=2, version=Version(1, 5))
    assert solver.make() == [2]
    assert not solver.answering.asked


@pytest.mark.parametrize(
    ("policy", "solver_has", "kept"),
    [
        (Version(0, 5), Version(0, 5), True),
        (Version(1, 5), Version(0, 5), True),
        (Version(0, 5), LOST, False),
        (Version(1, 5), LOST, False),
        (Version(0, 5), None, False),
    ],
    ids=["both survive", "one is newer", "one is lost", "one is lost, one newer", "one is being loaded"],
)
def test_a_group_goes_on_if_the_weights_of_no_model_are_lost(
    tmp_path: Path, policy: Version, solver_has: Version | None, kept: bool
) -> None:
    """At a rollout with an engine for each: what is finished, and not counted yet, has tokens of both."""
    rollout = WorkerReceiver(setting_of("rollout/0", tmp_path, ["flow=self_play", "layout=split"]))
    outbound, inboxes = rollout._outbound, rollout.session._inboxes
    assert outbound is not None
    with rollout.node.board.condition:
        outbound.core.want(100, 0.0)
        outbound.core.handle(Grant("trainer/0", 0, 0, 1, 1, (lease(0),)), 0.0)
        outbound.core.take_granted()
        versions = Ragged.from_rows([[[0, 5, 0, 1]]] * G, torch.int64)
        outbound.finish(group(0).with_columns(policy_versions=versions), {}, 0.0)
        assert outbound.core.held() == [0]
    inboxes["policy"].loaded, inboxes["solver"].loaded = policy, solver_has
    facts = {OWNERS: ["trainer/0"], TERM: 1, BEGINS: [(1, 5)]}
    rollout.node.membership.peers["trainer/0"].facts = facts
    rollout.node._tick()
    assert outbound.core.held() == [0] * kept
    rollout.close()
