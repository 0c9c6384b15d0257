"""What a term that restarts has cost."""

from __future__ import annotations

import time
from pathlib import Path

from distflow.launch.deploy.monitor import REPEATED as SHOWN_REPEATED
from distflow.launch.deploy.monitor import SECONDS as SHOWN_SECONDS
from distflow.runtime.disk import Disk
from distflow.runtime.metrics import REPEATED, SECONDS, MetricStore, MetricWriter, Recovery, last_step


def test_steps_behind_the_checkpoint_are_repeated(tmp_path: Path) -> None:
    writer = MetricWriter(tmp_path, "trainer-0", Disk())
    for step in range(1, 9):
        writer.write(step, 0, {"loss": 0.5})
    writer.close()
    metrics = MetricStore()
    Recovery(tmp_path, "trainer-0", time.monotonic() - 2.0, 5).note(metrics)
    found = metrics.drain()
    assert found[REPEATED] == 3.0
    assert 2.0 <= found[SECONDS] < 10.0
    assert (SECONDS, REPEATED) == (SHOWN_SECONDS, SHOWN_REPEATED)


def test_a_worker_that_wrote_nothing_or_was_cut_short_repeats_what_is_known(tmp_path: Path) -> None:
    assert last_step(tmp_path / "none.jsonl") == 0
    path = tmp_path / "cut.jsonl"
    path.write_text('{"step": 3, "term": 0}\n{"step": 4, "ter\n{"step"')
    assert last_step(path) == 3
