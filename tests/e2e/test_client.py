"""Clients of a real run: what the page shows, whom the run waits for, what is read when somebody is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import distflow
from distflow.client import Client, Samples, StaleRows
from distflow.errors import UserError
from tests.e2e.runs import PACED, PROMPTS, SAMPLES, Launch, Run, check_trained_once, cli
from tests.polling import eventually
from tests.test_docs import ROOT, files_in

STEPS = 60
READER = Path(__file__).with_name("reading_client.py")


LABELLER = Path(__file__).with_name("labelling_client.py")
LABELLED = (
    "flow.steps.reward={call: 'distflow.workers.clients:by_client', "
    "with: {reads: [uid, prompt_text, response_text], writes: {reward: number}}}"
)


def programs(folder: Path, program: Path = READER) -> Iterator[subprocess.Popen[str]]:
    """Two that have imported what they need, and wait for the run; the first one hangs with what it has claimed."""
    command = [sys.executable, str(program), str(folder)]
    started = [subprocess.Popen([*command, *more], stdout=subprocess.PIPE, text=True) for more in (["--hang"], [])]
    for process in started:
        assert next_line(process) == "ready"
        yield process


def next_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_the_program_that_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path / "runs", "quickstart", ["quickstart", *PACED, f"run.training_steps={STEPS}"])
    try:
        monkeypatch.chdir(tmp_path)
        eventually(lambda: (run.folder / "run.json").exists())
        exec(compile(files_in(ROOT / "docs" / "service.md")["best_answers.py"], "best_answers.py", "exec"), {})
        assert run.wait() == 0
        with pytest.raises(UserError, match="this run is over"):
            distflow.Client(run.folder)
    finally:
        run.end()
    for line in (tmp_path / "best.jsonl").read_text().splitlines():
        assert json.loads(line).keys() == {"prompt", "response"}


def test_every_group_is_read_once_although_a_client_is_killed(tmp_path: Path) -> None:
    hangs, reads = programs(tmp_path / "read")
    run = Run(tmp_path, "read", ["quickstart", *PACED, f"run.training_steps={STEPS}", "layout.pools.trainer.count=2"])
    try:
        held = json.loads(next_line(hangs))
        hangs.send_signal(signal.SIGKILL)
        out, _ = reads.communicate(timeout=60)
        assert run.wait() == 0
    finally:
        for process in (hangs, reads):
            process.kill()
            process.wait()
        run.end()
    used = [position for line in out.splitlines() for position in json.loads(line)]
    assert held
    assert set(held) <= set(used), "what the first had claimed goes to the other one"
    assert len(used) == len(set(used))
    trained = {int(line["uid"][2]) for line in run.dumps() if line["step"] == STEPS}
    assert len(trained) == PROMPTS
    assert trained <= set(used), f"{SAMPLES} samples each"


def claimed(client: Client, **wanted: object) -> Samples | None:
    return client.get(["uid"], consumer="all", lossless=True, timeout=60, **wanted)  # type: ignore[arg-type]


def positions(samples: Samples) -> set[int]:
    return set(samples.batch.dense("uid")[:, 2].tolist())


def status(run: Run, *more: str) -> str:
    return cli("status", run.name, "--runs-dir", str(run.folder.parent), *more).stdout


def held_up(run: Run) -> bool:
    return "while the run waits for consumer 'all', which loses nothing, to read samples" in status(run)


def test_the_run_waits_for_a_lossless_consumer_until_it_reads_or_is_forgotten(launch: Launch) -> None:
    steps, many = 20, 32
    run = launch(
        "quickstart",
        "limits.consumer_mb=1",
        f"batch.prompts={many}",
        f"batch.samples_per_prompt={many}",
        f"run.training_steps={steps}",
    )
    run.until(lambda: (run.folder / "run.json").exists(), "run.json")
    with Client(run.folder) as client:
        first = claimed(client, rows=1)
        assert first is not None
        run.until(lambda: held_up(run), "the wait for the consumer")
        trained = run.steps_done()
        assert trained < steps - 1
        (counted,) = json.loads(status(run, "--json"))["consumers"]
        assert counted["name"] == "all"
        assert (counted["lossless"], counted["clients"], counted["missed"]) == (True, 1, 0)
        assert counted["claimed"] == len(positions(first))
        assert counted["kept_bytes"] >= 1 << 20
        assert f"{counted['unread']} groups unread" in status(run)
        first.acknowledge()
        seen = positions(first)
        more = claimed(client, rows=2 * steps * many * many)
        assert more is not None
        assert run.steps_done() < steps, "more rows than are kept are not waited for"
        more.acknowledge()
        seen |= positions(more)
        while len(seen) < (trained + 2) * many:
            some = claimed(client)
            assert some is not None
            with some:
                seen |= positions(some)
        assert min(seen) == 0
        run.until(lambda: held_up(run), "the wait for the consumer, which reads no more")
        assert trained < run.steps_done() < steps
        client.forget("all")
        assert run.wait() == 0, run.output


def test_claims_end_with_the_trainer_and_everything_is_seen_again(launch: Launch) -> None:
    two = ["layout.pools.trainer.count=2", "run.save_every=2", f"run.training_steps={STEPS // 2}"]
    run = launch("quickstart", *PACED, *two)
    run.until(lambda: (run.folder / "run.json").exists(), "run.json")
    with Client(run.folder) as client:
        first = claimed(client, rows=1)
        assert first is not None
        run.until(lambda: run.saved() and run.saved()[-1] >= 4, "a checkpoint of what it has not read")
        former = {name: run.pid_of(name) for name in ("trainer/0", "trainer/1")}
        os.kill(former["trainer/0"], signal.SIGKILL)
        again = lambda name: any(pid != former[name] for pid in run.pids_of(name))  # noqa: E731
        run.until(lambda: all(map(again, former)) and former["trainer/1"] not in run.pids_of("trainer/1"), "both again")
        with pytest.raises(StaleRows, match="a training worker has restarted"):
            first.acknowledge()
        seen: set[int] = set()
        while (some := claimed(client, rows=64)) is not None:
            seen |= positions(some)
            # Some may be of the former life of the other one, which has not been heard of in its new one yet.
            with suppress(StaleRows):
                some.acknowledge()
        assert run.wait() == 0, run.output
    assert seen == set(range(STEPS // 2 * PROMPTS)), "what the checkpoint counts is not generated again, but is kept"


def test_what_a_lossless_consumer_has_not_read_survives_a_stop(launch: Launch) -> None:
    settings, name = ["quickstart", *PACED, "run.training_steps=12"], f"stopped-{os.getpid()}"
    first = launch(*settings, "run.stop_after=6", name=name)
    first.until(lambda: (first.folder / "run.json").exists(), "run.json")
    with Client(first.folder) as client:
        some = claimed(client, rows=1)
        assert some is not None
        some.acknowledge()
        seen = positions(some)
        assert first.wait() == 0, first.output
    again = launch("--resume", "run.stop_after=null", "limits.drain_s=60", name=name)
    again.until(lambda: again.record()["state"] == "running", "the run again")
    with Client(again.folder) as client:
        while (some := claimed(client, rows=64)) is not None:
            with some:
                assert not positions(some) & seen
                seen |= positions(some)
        assert again.wait() == 0, again.output
    assert seen == set(range(12 * PROMPTS))


def rewarded(run: Run, steps: int) -> None:
    """Every sample was trained on once, with the reward that a labeller has written."""
    check_trained_once(run, steps)
    assert all(line["reward"] == len(line["response"]) / 4 for line in run.dumps())


def test_the_labeller_that_is_shown(launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = launch("labelled", *PACED, "run.training_steps=10")
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir(exist_ok=True)
    Path("runs/labelled").symlink_to(run.folder)
    run.until(lambda: (run.folder / "run.json").exists(), "run.json")
    run.until(lambda: "a client outside the run to write 'reward'" in status(run), "the wait for a labeller")
    assert "the run waits for a client to write 'reward' (consumer 'reward'): start a program" in status(run)
    more = "waits for 936 rows more, but layout.max_staleness=0 bounds what is generated until then: let it get fewer"
    with Client(run.folder) as greedy, ThreadPoolExecutor() as pool:
        got = pool.submit(greedy.get, ["prompt_text"], rows=1000, consumer="reward", timeout=60)
        run.until(lambda: more in status(run), "the hint for a client that asks for more than there can be")
        greedy.close()
        with pytest.raises(UserError, match="this client is closed"):
            got.result()
    exec(compile(files_in(ROOT / "docs" / "service.md")["labeller.py"], "labeller.py", "exec"), {})
    assert run.wait() == 0, run.output
    check_trained_once(run, 10)
    assert {line["reward"] for line in run.dumps()} <= {0.0, 1.0}


def test_samples_are_written_once_although_a_labeller_and_the_trainers_are_killed(
    tmp_path: Path, launch: Launch
) -> None:
    name = f"written-{os.getpid()}"
    hangs, labels = programs(tmp_path / "runs" / name, LABELLER)
    two = ["layout.pools.trainer.count=2", "run.save_every=3", "run.training_steps=20"]
    run = launch("quickstart", *PACED, LABELLED, *two, name=name)
    try:
        held = json.loads(next_line(hangs))
        hangs.send_signal(signal.SIGKILL)
        run.until(lambda: run.steps_done() >= 10, "the fifth training step of two")
        os.kill(run.pid_of("trainer/1"), signal.SIGKILL)
        out, _ = labels.communicate(timeout=90)
        assert run.wait() == 0, run.output
    finally:
        for process in (hangs, labels):
            process.kill()
            process.wait()
    written = {position for line in out.splitlines() for position in json.loads(line)}
    assert held
    assert set(held) <= written, "what the first had claimed was written by the other one"
    assert run.record()["term"] == 1
    rewarded(run, 20)


def test_versions_of_the_policy_are_taken_whoever_dies(launch: Launch, tmp_path: Path) -> None:
    name = f"versions-{os.getpid()}"
    folder, program = tmp_path / "runs" / name, Path(__file__).with_name("weights_client.py")
    other = subprocess.Popen([sys.executable, str(program), str(folder), "--hang"], stdout=subprocess.PIPE, text=True)
    assert next_line(other) == "ready"
    run = launch("quickstart", *PACED, "run.save_every=5", f"run.training_steps={STEPS}", name=name)
    try:
        taken = [int(next_line(other).split()[0]) for _ in range(3)]
        other.send_signal(signal.SIGKILL)
        with Client(run.folder) as client:
            subscription = client.subscribe_weights()
            late = next(subscription)
            run.until(run.saved, "a checkpoint")
            os.kill(run.pid_of("trainer/0"), signal.SIGKILL)
            later = list(subscription)
    finally:
        other.kill()
        other.wait()
    assert run.wait() == 0, run.output
    assert taken == sorted(set(taken))
    assert late.version >= taken[-1], "the newest there is"
    numbers = [weights.version for weights in later]
    assert numbers
    assert sum(now <= before for before, now in pairwise(numbers)) <= 1, "only where training began again"
    assert run.record()["term"] == 1
    if numbers[-1] == STEPS:
        (part,) = (run.folder / "checkpoints" / f"step_{STEPS:06d}").glob("model-policy-*.safetensors")
        saved = load_file(part)
        assert all(torch.equal(tensor, saved[f"model.{name}"]) for name, tensor in later[-1].tensors.items())
    assert run.leftovers() == []
