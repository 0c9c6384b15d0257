"""Rewards in child processes: judged in parallel, killed after a timeout, replaced before that."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from distflow.errors import PluginError
from distflow.types import Completion
from distflow.workers import reward_pool
from distflow.workers.reward_judging import Verdict
from distflow.workers.reward_pool import RewardPool

FUNCTIONS = """
import os, re, subprocess, time

if os.path.exists(os.path.join(os.path.dirname(__file__), "slow")):
    time.sleep(60)

def by_text(sample):
    word, _, number = sample.response.partition(" ")
    if word == "start":
        child = subprocess.Popen(["sleep", "300"])
        with open(number, "w") as file:
            file.write(str(child.pid))
        re.match("(a+)+$", "a" * 60 + "b")
    if word == "die":
        os.kill(os.getpid(), 9)
    if word == "sleep":
        time.sleep(float(number))
    return os.getpid()

def together(completions, **kwargs):
    return [float(len(text)) for text in completions]
"""

MakePool = Callable[..., RewardPool]


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[MakePool]:
    path = tmp_path / "rewards.py"
    path.write_text(FUNCTIONS)
    made: list[RewardPool] = []

    def make(processes: int = 4, timeout_s: float = 60.0, function: str = "by_text") -> RewardPool:
        made.append(RewardPool(f"{path}:{function}", processes, timeout_s))
        return made[-1]

    yield make
    for one in made:
        one.close()


def children() -> set[int]:
    """Child processes, including those of other tests."""
    return {child.pid for child in psutil.Process().children()}


def completion(response: str) -> Completion:
    return Completion("407=", response, {"answer": "407"}, "stop", (2, 1))


def verdicts(pool: RewardPool, responses: Sequence[str]) -> list[Verdict]:
    """The verdicts of all samples, in order; each must be judged once."""
    found = [one for some in pool.judge([completion(text) for text in responses]) for one in some]
    assert sorted(row for row, _ in found) == list(range(len(responses)))
    return [verdict for _, verdict in sorted(found, key=lambda one: one[0])]


def seconds(action: Callable[[], object]) -> float:
    began = time.monotonic()
    action()
    return time.monotonic() - began


@pytest.mark.parametrize("function", ["together", "by_text"])
def test_nobody_is_asked_about_no_samples(pool: MakePool, function: str) -> None:
    judging = pool(processes=1, function=function)
    for responses in (["a"], [], ["bb", "c"], [], [], ["ddd"]):
        found = verdicts(judging, responses)
        assert [one.failure for one in found] == [None] * len(responses)
        if function == "together":
            assert [one.values["reward"] for one in found] == [float(len(text)) for text in responses]


def test_samples_that_time_out_do_so_side_by_side(pool: MakePool) -> None:
    """20 samples of 1 s take 4 processes 5 s; sequentially they would take at least 20."""
    others = children()
    judging = pool(processes=4, timeout_s=1.0)
    verdicts(judging, ["quick"])
    taken: list[Verdict] = []
    assert seconds(lambda: taken.extend(verdicts(judging, ["sleep 60"] * 20))) < 15.0
    assert [verdict.failure for verdict in taken] == ["timeout"] * 20
    assert len(children() - others) <= 8


def test_a_replacement_is_loaded_before_a_late_one_is_killed(pool: MakePool) -> None:
    judging = pool(processes=1, timeout_s=3.0)
    verdicts(judging, ["quick"])
    late, after = verdicts(judging, ["sleep 60", "quick"])
    assert (late.failure, after.failure) == ("timeout", None)
    assert psutil.Process(int(after.values["reward"])).create_time() < time.time() - 0.4, "started long before"


def test_a_quick_function_keeps_few_processes(pool: MakePool) -> None:
    others = children()
    judging = pool(processes=8)
    verdicts(judging, ["quick"] * 40)
    assert len(children() - others) == 2


def test_a_slow_function_gets_all_processes_it_may_have(pool: MakePool) -> None:
    judging = pool(processes=3)
    pids = {verdict.values["reward"] for verdict in verdicts(judging, ["sleep 0.4"] * 12)}
    assert 3 <= len(pids) <= 4, "the spare one may get its turn, too"


def test_one_that_dies_is_an_error_and_is_replaced(pool: MakePool) -> None:
    found = verdicts(pool(), ["quick", "die", "quick"])
    assert [verdict.failure for verdict in found] == [None, "error", None]
    assert found[1].message.endswith("exited with code -9")


def test_one_that_dies_between_two_batches_costs_nothing(pool: MakePool) -> None:
    judging = pool()
    child = psutil.Process(int(verdicts(judging, ["quick"])[0].values["reward"]))
    child.kill()
    while child.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert verdicts(judging, ["quick"])[0].failure is None


def test_half_a_batch_leaves_no_answers_for_the_next(pool: MakePool) -> None:
    judging = pool(processes=2)
    given_up = judging.judge([completion(text) for text in ("quick", "sleep 0.3", "sleep 0.3")])
    next(given_up)
    given_up.close()
    assert all(verdict.failure is None for verdict in verdicts(judging, ["quick"] * 3))


def test_children_that_do_not_get_ready_stop_only_who_has_no_other(
    pool: MakePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judging = pool()
    verdicts(judging, ["quick"])
    (tmp_path / "slow").touch()
    monkeypatch.setattr(reward_pool, "START_S", 0.3)
    found = verdicts(judging, ["sleep 0.5"] * 4)
    assert [verdict.failure for verdict in found] == [None] * 4
    with pytest.raises(PluginError, match=r"by_text' was not ready within 0\.3 s"):
        verdicts(judging, ["die"] * 4)
    with pytest.raises(PluginError, match=r"by_text' was not ready within 0\.3 s"):
        verdicts(pool(), ["quick"])


def test_long_requests_pass_the_pipe(pool: MakePool) -> None:
    assert verdicts(pool(), ["x" * 1_000_000] * 3)[2].failure is None


def started(path: Path) -> psutil.Process:
    """The process that `by_text` started; the function then blocks its interpreter forever."""
    end = time.monotonic() + 30.0
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < end, "the function is not called"
        time.sleep(0.02)
    return psutil.Process(int(path.read_text()))


def gone(process: psutil.Process) -> bool:
    """Within a few seconds."""
    end = time.monotonic() + 10.0
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > end:
            process.kill()
            return False
        time.sleep(0.02)
    return True


def test_what_a_late_function_started_ends_with_it(pool: MakePool, tmp_path: Path) -> None:
    judging = pool(timeout_s=1.0)
    assert verdicts(judging, [f"start {tmp_path / 'pid'}"])[0].failure == "timeout"
    assert gone(started(tmp_path / "pid"))


def test_what_a_function_started_ends_with_a_worker_that_is_killed(pool: MakePool, tmp_path: Path) -> None:
    pool()
    code = (
        "import sys; from distflow.types import Completion; from distflow.workers.reward_pool import RewardPool\n"
        "list(RewardPool(sys.argv[1], 1, 300.0).judge([Completion('', sys.argv[2], {}, 'stop')]))"
    )
    function, text = f"{tmp_path / 'rewards.py'}:by_text", f"start {tmp_path / 'pid'}"
    with subprocess.Popen([sys.executable, "-c", code, function, text]) as worker:
        try:
            child = started(tmp_path / "pid")
            judging = child.parent()
        finally:
            worker.kill()
    assert judging is not None
    assert gone(judging)
    assert gone(child)


def test_processes_end_with_close_and_ignore_interrupts(pool: MakePool) -> None:
    judging = pool()
    child = psutil.Process(int(verdicts(judging, ["quick"])[0].values["reward"]))
    assert child.ppid() == os.getpid()
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(child.pid, number)
    assert verdicts(judging, ["quick"] * 9)[0].failure is None
    assert child.is_running()
    judging.close()
    assert not psutil.pid_exists(child.pid)
    judging.close()
