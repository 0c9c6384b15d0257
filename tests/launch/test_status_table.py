"""What `distflow status` shows of the rows that workers report."""

from dataclasses import asdict
from typing import Any

import pytest

from distflow.comm.traffic import SHM, ZMQ, Traffic
from distflow.launch.commands.status import _print_table

ROW: dict[str, Any] = {"name": "rollout/0", "pid": 7, "host": "a", "state": "generating", "step": 3, "version": 2}


def test_the_table_tells_what_went_by_which_lane(capsys: pytest.CaptureFixture[str]) -> None:
    traffic = Traffic(bytes_sent=52_600_000, bytes_received=1_000_000)
    traffic.count(SHM, 3, 52_000_000)
    traffic.count(ZMQ, 90, 600_000)
    silent = ROW | {"name": "rollout/1", "state": "no answer"}
    _print_table([ROW | {"memory_mb": 10.0, "traffic": asdict(traffic)}, silent])
    header, told, nothing = (line.split() for line in capsys.readouterr().out.splitlines())
    assert header[-4:] == ["sent", "by", "lane,", "MB"]
    assert told[-6:] == ["52.6", "1.0", "shm", "52.0,", "zmq", "0.6"]
    assert nothing[-2:] == ["3", "2"]
