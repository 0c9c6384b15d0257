"""The most memory that a process has held, measured by the kernel."""

from __future__ import annotations

import json
from pathlib import Path

from distflow.comm.processes import resident_mb
from distflow.runtime.disk import Disk
from distflow.runtime.metrics import HOST, MetricWriter, PeakMemory


def test_a_peak_is_seen_after_it_is_over_and_then_forgotten() -> None:
    peak = PeakMemory("cpu")
    peak.take()  # what this process has held before
    before = peak.take()[HOST]
    block = bytearray(b"x" * (256 << 20))
    del block
    with_block = peak.take()[HOST]
    assert with_block > before + 0.2
    assert with_block - resident_mb() / 1024 > 0.2
    assert peak.take()[HOST] < with_block - 0.2


def test_where_the_kernel_forgets_no_peak_it_stays(tmp_path: Path) -> None:
    (tmp_path / "status").write_text("VmPeak:\t 9999999 kB\nVmHWM:\t 1048576 kB\nVmRSS:\t 52 kB\n")
    (tmp_path / "clear_refs").mkdir()
    peak = PeakMemory("cpu", tmp_path)
    assert [peak.take(), peak.take()] == [{HOST: 1.0}] * 2


def test_a_gpu_that_only_the_engine_s_own_process_uses_is_not_asked() -> None:
    """To ask it would be an error there."""
    assert list(PeakMemory("cuda:0").take()) == [HOST]


def test_every_line_of_metrics_has_it(tmp_path: Path) -> None:
    writer = MetricWriter(tmp_path, "rollout-0", Disk(), lambda: {HOST: 0.5})
    writer.write(1, 0, {"actor/lr": 0.1})
    writer.close()
    line = json.loads((tmp_path / "metrics" / "rollout-0.jsonl").read_text())
    assert line == {"step": 1, "term": 0, "actor/lr": 0.1, HOST: 0.5}
