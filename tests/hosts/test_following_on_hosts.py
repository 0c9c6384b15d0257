"""Trackers and copies of a run whose hosts have folders of their own: of the whole run, not of one host."""

from __future__ import annotations

import json

import pytest

from distflow.metrics.merge import MetricsReader
from distflow.runtime.checkpoint.commit import examine
from tests.e2e.runs import SMALL
from tests.e2e.test_trackers import ODD
from tests.hosts.conftest import Cluster
from tests.hosts.test_hosts_e2e import hosts_file
from tests.hosts.test_training_on_hosts import SHARED_OR_NOT, await_end

STEPS = 8
TRAINERS = ["layout.pools.trainer.count=2", "layout.pools.rollout.count=2", "run.save_every=4"]


@SHARED_OR_NOT
def test_a_tracker_gets_the_rows_of_all_hosts_and_a_copy_their_parts(shaped: Cluster, shared: bool) -> None:
    place = shaped.folder / "place"
    keys = [f"run.training_steps={STEPS}", f"run.copy_to={place}", f"run.trackers.forks.call={ODD}:Forks"]
    two = hosts_file(shaped, "h0 slots=2", "h1 slots=2", shared=shared)
    code, out, err = shaped.launch(two, *SMALL, *TRAINERS, *keys)
    assert code == 0, f"{out}\n{err}"
    await_end(shaped)

    reader = MetricsReader(shaped.runs_dir / "quickstart")
    reader.read()
    folders = [shaped.runs_dir, *(shaped.folder / name for name in ("h0", "h1"))]
    files = {path.resolve() for folder in folders for path in folder.rglob("given.jsonl")}
    (file,) = files
    given = [json.loads(line) for line in file.read_text().splitlines()]
    rows = {step: values for kind, step, values in (one for one in given if one[0] == "values")}
    expected = {int(step["step"]): step["critic/rewards/mean"] for step in reader.merged()}
    assert list(rows) == list(range(1, STEPS + 1))
    assert {step: row["critic/rewards/mean"] for step, row in rows.items()} == pytest.approx(expected)

    copied = place / "quickstart" / "checkpoints" / f"step_{STEPS:06d}"
    commit, fault = examine(copied)
    assert commit is not None
    assert fault == ""
    assert {name for name in commit.parts if name.startswith("worker-")} == {
        "worker-trainer-0.json",
        "worker-trainer-1.json",
    }
    assert not list(copied.glob("copied_*"))
