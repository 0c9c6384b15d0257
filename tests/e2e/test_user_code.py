"""Code of the user's inside a run: rewards, steps, scripts and data sources, when they work and when they fail."""

import json
import os
import re
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from distflow.data.randomness import permutation
from tests.e2e.runs import Launch, Run, check_trained_once, cli

STEPS = 4
GROUPS, SAMPLES, LEDGERS = 32, 8, 8
PROMPTS = 1000

RECIPE = f"""\
defaults: [quickstart, _self_]
run: {{name: mine, training_steps: {STEPS}}}
"""

REWARDS = """\
import os
import time
from pathlib import Path


def check(prompt):
    if prompt.endswith("3="):
        raise ValueError(f"cannot judge {prompt}")


def picky(sample):
    check(sample.prompt)
    return float(sample.response == sample.prompt.rstrip("="))


def moody(sample):
    if sample.prompt.endswith("3=") or sample.response_ids[0] % 4 == 0:
        raise ConnectionError("the judge is away")
    return float(len(sample.response))


def hangs_twice(sample):
    for number in range(2):
        try:
            os.close(os.open(Path(__file__).parent / f"hung-{number}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        time.sleep(3600)
    return 0.5


def hangs(sample):
    time.sleep(3600)


def content(sample):
    return 0.5
"""

STEP_FILE = """\
import os
from pathlib import Path

import torch

from distflow import Batch, Ragged, StepContext, step


def helper(values):
    raise ValueError("no advantage today")


@step(role="train", reads=["reward", "group", "response_ids"], writes=["advantage"], scope="group")
def raising(batch: Batch, ctx: StepContext) -> Batch:
    if ctx.training_step == 1:
        helper(batch.dense("reward"))
    return plain(batch, ctx)


def fail_gpu(times):
    for number in range(times):
        try:
            os.close(os.open(Path(__file__).parent / f"failed-{number}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        raise torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered")


@step(role="train", reads=["reward", "group", "response_ids"], writes=["advantage"], scope="group")
def on_failing_gpu(batch: Batch, ctx: StepContext) -> Batch:
    if ctx.training_step == 2:
        fail_gpu(times=1)
    return plain(batch, ctx)


@step(role="score", reads=["reward"], writes=["rewards/mine"])
def scored_on_failing_gpu(batch: Batch, ctx: StepContext) -> Batch:
    fail_gpu(times=2)
    return batch.with_columns(**{"rewards/mine": batch.dense("reward")})


@step(role="train", reads=["reward", "group", "response_ids"], writes=["advantage"], scope="group")
def plain(batch: Batch, ctx: StepContext) -> Batch:
    response = batch.ragged("response_ids")
    values = batch.dense("reward").repeat_interleave(response.lengths)
    return batch.with_columns(advantage=Ragged(values, response.offsets))


@step(role="train", reads=["reward", "group", "response_ids"], writes=["advantage"], scope="group")
def forgetful(batch: Batch, ctx: StepContext) -> None:
    batch.with_columns(advantage=batch.ragged("response_ids"))


@step(role="train", reads=["reward", "group", "response_ids"], writes=["advantage"], scope="group")
def idle(batch: Batch, ctx: StepContext) -> Batch:
    return batch


@step(role="score", reads=["response_text", "policy_versions"], writes=["reward", "score"])
def never_content(batch: Batch, ctx: StepContext) -> Batch:
    zeros = torch.zeros(len(batch))
    reasons = ["too dull"] + [""] * (len(batch) - 1) if len(batch) == 1 else ["too dull"] * len(batch)
    return batch.with_columns(reward=zeros, score=zeros, drop_reason=Ragged.from_texts(reasons))


@step(role="score", reads=["reward"], writes=["drop_reason"], scope="group")
def keeps(batch: Batch, ctx: StepContext) -> Batch:
    batch.group_bounds()
    return batch.with_columns(drop_reason=Ragged.from_texts([""] * batch.rows))


@step(role="score", reads=["response_text"], writes=["rewards/length"], fills={"rewards/length": -1.0})
def length(batch: Batch, ctx: StepContext) -> Batch:
    ctx.metrics.add("mine/called", 1)
    ctx.metrics.max("mine/version/max", ctx.policy_version)
    return batch.with_columns(**{"rewards/length": batch.ragged("response_text").lengths.float()})
"""

SOURCES = """\
from distflow.data.sources import PromptText


class Few:
    def __init__(self, count, broken):
        self.count, self.broken = count, broken

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if index == self.broken:
            raise OSError("the disk is gone")
        return PromptText(f"{index}=", {"answer": str(index)})


def few(*, count: int = 5, broken: int = -1) -> Few:
    return Few(count, broken)


def never(*, count: int = 5) -> Few:
    raise LookupError("no such data set")
"""

SCRIPTS = """\
def script(w):
    for groups in w.generate("sample", w.leases()):
        groups = w.call("reward", groups)
        print("my own script sends", len(groups), "samples", flush=True)
        w.send("samples", groups)
"""


OWN_SCRIPT = "layout: {pools: {rollout: {script: './scripts.py'}}}"
SCORED_ON_FAILING_GPU = "flow: {steps: {filter: {call: './steps.py:scored_on_failing_gpu'}}}"
NEVER = "flow: {steps: {reward: {call: './steps.py:never_content'}}}"
Recipe = Callable[..., str]


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    """`recipe(section, …)`: a recipe of the user's with files of the user's beside it."""
    for name, text in {"rewards": REWARDS, "steps": STEP_FILE, "sources": SOURCES, "scripts": SCRIPTS}.items():
        (tmp_path / f"{name}.py").write_text(text)

    def write(*sections: str) -> str:
        path = tmp_path / "mine.yaml"
        path.write_text(RECIPE + "".join(f"{section}\n" for section in sections))
        return str(path)

    return write


def reward(function: str, **settings: object) -> str:
    more = "".join(f", {name}: {value}" for name, value in settings.items())
    return f"flow: {{steps: {{reward: {{with: {{function: './rewards.py:{function}'{more}}}}}}}}}"


def advantage(function: str) -> str:
    return f"flow: {{steps: {{advantage: {{call: './steps.py:{function}'}}}}}}"


def steps_or_end(run: Run, steps: int) -> None:
    run.until(lambda: run.steps_done() >= steps or run.process.poll() is not None, f"training step {steps}")
    assert run.process.poll() is None, run.wait() or run.output


def total(run: Run, metric: str) -> float:
    return sum(line[metric] for line in run.metrics() if metric in line)


def dropped_positions(run: Run) -> set[int]:
    """Every ledger went through its positions in order, each trained once or passed over: returns the latter."""
    times = Counter((line["uid"][2], line["sample"]) for line in run.dumps())
    assert set(times.values()) == {1}
    trained = {position for position, _ in times}
    assert len(times) == SAMPLES * len(trained)
    per_step = Counter(line["step"] for line in run.dumps())
    assert per_step == dict.fromkeys(range(1, STEPS + 1), GROUPS * SAMPLES)
    last = {position % LEDGERS: position for position in sorted(trained)}
    return {position for ledger in range(LEDGERS) for position in range(ledger, last[ledger], LEDGERS)} - trained


def shown_first(output: str, file: str) -> bool:
    """The first frame that the output shows is in the user's file."""
    frames = re.findall(r'File "([^"]+)", line \d+', output)
    return bool(frames) and frames[0].endswith(file)


def test_a_training_worker_whose_gpu_failed_comes_back(launch: Launch, recipe: Recipe) -> None:
    run = launch(recipe(advantage("on_failing_gpu")), "run.save_every=1")
    assert run.wait() == 0, run.output
    assert run.record()["term"] == 1
    assert "trainer/0 was ended by exit code 71 (its GPU has failed)" in run.output
    told = cli("status", run.name, "--runs-dir", str(run.folder.parent)).stdout
    assert "training was restarted once since the launch; the last time: trainer/0 was ended by exit code 71" in told
    assert re.search(r"go on from (training step [1-9]|the beginning)", told), told
    check_trained_once(run, STEPS, GROUPS)


@pytest.mark.parametrize(("restarts", "code"), [(2, 0), (0, 3)])
def test_a_generating_worker_whose_gpu_failed_is_started_again(
    launch: Launch, recipe: Recipe, restarts: int, code: int
) -> None:
    run = launch(recipe(SCORED_ON_FAILING_GPU), f"limits.restarts={restarts}")
    assert run.wait() == code, run.output
    logs = "".join(log.read_text() for log in run.folder.glob("logs/agent-0.log"))
    # Both workers may meet it before either has ended.
    assert logs.count("ended with exit code 71 (its GPU has failed)") in ((1, 2) if code else (2,))
    if code:
        failure = run.record()["failure"]
        assert failure["error"] == "DeviceFault"
        assert failure["message"].startswith("the GPU failed (uncorrectable ECC error): ")
        assert "it had been restarted 0 times" in failure["message"]


def test_samples_on_which_the_reward_fails_are_dropped_and_replaced(launch: Launch, recipe: Recipe) -> None:
    run = launch(recipe(reward("picky", on_error="drop", max_error_rate=1.0)))
    assert run.wait() == 0, run.output
    order = permutation(0, 0, PROMPTS)
    dropped = dropped_positions(run)
    assert dropped
    assert all(int(order[position]) % 10 == 3 for position in dropped)
    assert all(not line["prompt"].endswith("3=") for line in run.dumps())
    assert total(run, "group/dropped") >= len(dropped)
    assert total(run, "reward/errors") == SAMPLES * total(run, "group/dropped")
    logs = "".join(log.read_text() for log in run.folder.glob("logs/rollout-*.log"))
    assert "ValueError: cannot judge" in logs
    assert run.leftovers() == []


@pytest.mark.parametrize("layout", ["colocated", "services"])
def test_samples_on_which_the_reward_fails_are_left_out_and_the_others_trained_on(
    launch: Launch, recipe: Recipe, layout: str
) -> None:
    """Groups of which all fail are replaced."""
    run = launch(recipe(reward("moody", on_error="leave_out", max_error_rate=1.0)), f"layout={layout}")
    assert run.wait() == 0, run.output
    lines = run.dumps()
    assert len(lines) == STEPS * GROUPS * SAMPLES
    assert all(not line["prompt"].endswith("3=") for line in lines)
    out = [line for line in lines if "left_out" in line]
    assert 0.1 < len(out) / len(lines) < 0.6
    assert all(line["left_out"] == "reward error" and line["reward"] == 0 for line in out)
    assert all((line["response_ids"][0] % 4 == 0) == ("left_out" in line) for line in lines)
    assert total(run, "group/dropped") > 0
    assert min(total(run, "rollout/left_out"), total(run, "reward/errors")) >= len(out)
    for measured in run.metrics():
        judged = [line["reward"] for line in lines if line["step"] == measured["step"] and "left_out" not in line]
        assert measured["critic/rewards/mean"] == pytest.approx(sum(judged) / len(judged), rel=1e-5)


@pytest.mark.parametrize("layout", ["split", "services"])
def test_what_one_step_drops_no_later_one_brings_back(launch: Launch, recipe: Recipe, layout: str) -> None:
    added = "flow.steps.filter={call: './steps.py:keeps'}"
    file = recipe(reward("picky", on_error="drop", max_error_rate=1.0))
    run = launch(file, f"layout={layout}", added.replace("./", f"{Path(file).parent}/"))
    assert run.wait() == 0, run.output
    assert dropped_positions(run)
    assert all(not line["prompt"].endswith("3=") for line in run.dumps())


def test_colocated_workers_drop_samples_too(launch: Launch, recipe: Recipe) -> None:
    """Each of its training steps begins with groups that may be dropped and ends with groups that may not."""
    run = launch(recipe(reward("picky", on_error="drop", max_error_rate=1.0)), "layout=colocated")
    assert run.wait() == 0, run.output
    assert dropped_positions(run)
    assert all(not line["prompt"].endswith("3=") for line in run.dumps())
    assert run.leftovers() == []


@pytest.mark.parametrize("count", [1, 2])
def test_colocated_workers_hear_at_once_that_too_many_were_dropped(launch: Launch, recipe: Recipe, count: int) -> None:
    """Those that wait for leases, too, of which the owner gives no more."""
    few = ("layout=colocated", f"layout.pools.worker.count={count}", "batch.ledgers=2", "batch.max_refills=0")
    run = launch(recipe(reward("picky", on_error="drop", max_error_rate=1.0)), *few)
    assert run.wait(60) == 3, run.output
    told = r"worker/\d failed \(RefillsExhausted\): .* 1 groups were dropped \(reward error: 1\)"
    assert re.search(told, run.output), run.output
    assert run.leftovers() == []


def test_a_reward_that_would_drop_samples_on_the_training_side_is_refused(launch: Launch, recipe: Recipe) -> None:
    """They have arrived there: they would be trained on with reward 0."""
    on_trainer = "layout: {pools: {trainer: {steps: [reward]}}}"
    run = launch(recipe(reward("picky", on_error="drop", max_error_rate=1.0), on_trainer))
    assert run.wait() == 2, run.output
    assert "flow.steps.reward — may drop samples and runs on pool 'trainer' after they have arrived" in run.output
    again = launch(recipe(reward("picky", on_error="zero", max_error_rate=1.0), on_trainer))
    assert again.wait() == 0, again.output
    assert total(again, "reward/errors") > 0


def test_with_on_error_stop_the_users_frames_come_first(launch: Launch, recipe: Recipe) -> None:
    run = launch(recipe(reward("picky", on_error="stop")))
    assert run.wait() == 3, run.output
    assert shown_first(run.output, "rewards.py")
    assert re.search(r"(?s)in picky\n.*in check\n.*ValueError: cannot judge \d\d3=\n", run.output), run.output
    said = r"rollout/\d failed \(StepError\): reward function '.*rewards\.py:picky' in step 'reward' on rollout/\d, "
    assert re.search(said + r"training step 1, uid \(epoch, prompt, position\) \(0, \d*3, \d+\)", run.output), (
        run.output
    )
    assert "distflow/runtime" not in run.output
    assert run.leftovers() == []


def test_a_reward_that_hangs_is_killed_and_counted(launch: Launch, recipe: Recipe) -> None:
    # Without hedging: a copy of such a group on the other worker would be welcome, and nothing be passed over.
    run = launch(recipe(reward("hangs_twice", timeout_s=1.0)), "layout.hedging=false")
    assert run.wait() == 0, run.output
    assert total(run, "reward/timeouts") == 2
    assert 1 <= total(run, "group/dropped") <= 2
    assert len(dropped_positions(run)) == total(run, "group/dropped")
    assert run.leftovers() == []


def test_a_reward_that_always_hangs_is_told_and_ends_the_run(launch: Launch, recipe: Recipe) -> None:
    """In the first training step, of which there are no metrics yet."""
    run = launch(recipe(reward("hangs", timeout_s=2.0, processes=2)))
    run.until(lambda: "took longer" in "".join(map(Path.read_text, run.folder.glob("logs/rollout-*.log"))), "a log")
    rows = json.loads(cli("status", run.name, "--json", "--runs-dir", str(run.folder.parent)).stdout)["workers"]
    assert sum(row.get("counts", {}).get("reward/timeouts", 0) for row in rows) >= 1
    assert run.wait() == 3, run.output
    assert re.search(r"warning: the reward function timed out on rollout/\d: \d+ of \d+ samples so far", run.output)
    assert re.search(r"rollout/\d failed \(StepError\): .*all of the first \d+ samples failed", run.output), run.output
    assert "took longer than timeout_s=2.0" in run.output
    assert run.steps_done() == 0
    assert run.leftovers() == []


def test_too_many_errors_end_the_run(launch: Launch, recipe: Recipe) -> None:
    # All workers' counts are known to each of them after a second or two.
    run = launch(recipe(reward("picky", timeout_s=20.0)), "run.training_steps=500")
    assert run.wait() == 3, run.output
    assert re.search(r"\d+ of \d+ samples failed, more than max_error_rate=0\.05 allows", run.output), run.output
    assert shown_first(run.output, "rewards.py")
    assert run.record()["state"] == "failed"
    assert run.leftovers() == []


def test_a_step_that_raises_shows_the_users_file_before_anything_else(launch: Launch, recipe: Recipe) -> None:
    run = launch(recipe(advantage("raising")))
    assert run.wait() == 3, run.output
    assert shown_first(run.output, "steps.py")
    frames = r'(?s)File ".*steps\.py", line 16, in raising\n.*line 10, in helper\n.*ValueError: no advantage today\n'
    assert re.search(frames, run.output), run.output
    told = r"trainer/0 failed \(StepError\): step 'advantage' \(.*steps\.py:raising\) raised ValueError on trainer/0, "
    uids = r"training step 2, with uids \(epoch, prompt, position\) \(0, \d+, \d+\), .* in hand"
    assert re.search(told + uids, run.output), run.output
    assert "distflow/runtime" not in run.output
    # The others must not fail in their turn and so hide who it was.
    assert len(list(run.folder.glob("workers/*.failure.json"))) == 1
    assert run.leftovers() == []


@pytest.mark.parametrize(
    "function, message",
    [
        ("forgetful", r"returned NoneType; expected a Batch, for example batch\.with_columns"),
        ("idle", r"declares that it writes \['advantage'\], but its batch has only \["),
    ],
)
def test_a_step_that_returns_something_else(launch: Launch, recipe: Recipe, function: str, message: str) -> None:
    run = launch(recipe(advantage(function)), "layout=colocated")
    assert run.wait() == 3, run.output
    where = rf"worker/0 failed \(StepError\): step 'advantage' \(.*steps\.py:{function}\) on worker/0 "
    assert re.search(where + message, run.output), run.output
    assert run.leftovers() == []


def test_a_pool_with_a_script_of_its_own(launch: Launch, recipe: Recipe) -> None:
    run = launch(recipe(OWN_SCRIPT))
    assert run.wait() == 0, run.output
    assert dropped_positions(run) == set()
    logs = [log.read_text() for log in sorted(run.folder.glob("logs/rollout-*.log"))]
    assert all("my own script sends" in log for log in logs)
    assert (run.folder / "workers" / "rollout-0.py").read_text() == SCRIPTS


def test_a_script_of_ones_own_that_raises(launch: Launch, recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "scripts.py").write_text(SCRIPTS.replace('w.call("reward", groups)', "w.cal(groups)"))
    run = launch(recipe(OWN_SCRIPT))
    assert run.wait() == 3, run.output
    assert shown_first(run.output, "scripts.py")
    assert re.search(r"scripts\.py\", line 3, in script\n.*\n(.*\n)?AttributeError: .*'cal'", run.output), run.output
    assert re.search(r"rollout/\d failed \(StepError\): script .*scripts\.py on rollout/\d", run.output), run.output
    assert run.leftovers() == []


def test_a_script_of_ones_own_that_returns_too_early(launch: Launch, recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "scripts.py").write_text(SCRIPTS + "        return\n")
    run = launch(recipe(OWN_SCRIPT))
    assert run.wait() == 3, run.output
    assert re.search(r"the script of rollout/\d returned before the run was over", run.output), run.output
    assert run.leftovers() == []


def test_one_worker_with_a_step_of_its_own(launch: Launch, recipe: Recipe) -> None:
    run = launch(recipe("layout: {pools: {rollout: {each: {'1': {steps: ['+./steps.py:length']}}}}}"))
    assert run.wait() == 0, run.output
    assert dropped_positions(run) == set()
    for line in run.dumps():
        expected = len(line["response"]) if line["worker"] == "rollout/1" else -1.0
        assert line["rewards"]["length"] == expected, line
    assert {line["worker"] for line in run.dumps()} == {"rollout/0", "rollout/1"}
    called = [line for line in run.metrics() if "mine/called" in line]
    assert called
    assert all(line["mine/version/max"] == line["step"] - 1 for line in called)


def test_when_every_group_is_dropped_the_run_ends_with_the_reasons(launch: Launch, recipe: Recipe) -> None:
    run = launch(recipe(NEVER))
    assert run.wait() == 3, run.output
    said = r"trainer/0 failed \(RefillsExhausted\): training step 1, .*: \d+ groups were dropped \(too dull: \d+\)"
    assert re.search(said + r".*raise batch\.max_refills", run.output), run.output
    assert run.dumps() == []
    assert run.leftovers() == []


def test_a_data_source_of_ones_own(launch: Launch, recipe: Recipe) -> None:
    """Five prompts, so that every training step goes through them more than six times."""
    run = launch(recipe("data: {source: './sources.py:few', with: {count: 5}}"))
    assert run.wait() == 0, run.output
    assert dropped_positions(run) == set()
    for line in run.dumps():
        epoch, prompt, position = line["uid"]
        assert epoch == position // 5
        assert line["prompt"] == f"{prompt}="
    assert {line["uid"][1] for line in run.dumps()} == set(range(5))


@pytest.mark.parametrize(
    "settings, frame, message",
    [
        ("few', with: {broken: 3}", "__getitem__", r"OSError: the disk is gone\n.*at prompt position \d+"),
        ("never'", "never", r"LookupError: no such data set\n.*when it was made with \{\}"),
    ],
    ids=["while read", "when made"],
)
def test_a_data_source_that_fails(launch: Launch, recipe: Recipe, settings: str, frame: str, message: str) -> None:
    run = launch(recipe(f"data: {{source: './sources.py:{settings}}}"), "layout=colocated")
    assert run.wait() == 3, run.output
    assert shown_first(run.output, "sources.py")
    assert f"in {frame}\n" in run.output
    assert re.search(message, run.output), run.output
    assert re.search(r"worker/0 failed \(StepError\): data source .*sources\.py:", run.output), run.output
    assert run.leftovers() == []


def test_a_terminated_rollout_is_started_again(launch: Launch, recipe: Recipe) -> None:
    """With a process of its own for rewards, which must go with it."""
    steps = 40
    run = launch(recipe(reward("content", timeout_s=30.0)), f"run.training_steps={steps}")
    steps_or_end(run, 2)
    os.kill(run.pid_of("rollout/0"), signal.SIGTERM)
    assert run.wait() == 0, run.output
    assert re.search(r"rollout/0, incarnation 1", (run.folder / "logs" / "agent-0.log").read_text())
    times = Counter((line["uid"][2], line["sample"]) for line in run.dumps())
    assert times == {(p, s): 1 for p in range(steps * GROUPS) for s in range(SAMPLES)}
    assert run.leftovers() == []


def test_a_terminated_trainer_ends_the_run_where_that_is_wished(launch: Launch, recipe: Recipe) -> None:
    run = launch(recipe(), "run.training_steps=400", "layout.on_failure=stop")
    steps_or_end(run, 2)
    os.kill(run.pid_of("trainer/0"), signal.SIGTERM)
    assert run.wait() == 3, run.output
    assert re.search(r"trainer/0 was killed by signal 15 \(SIGTERM\) — .*--resume", run.output), run.output
    assert run.leftovers() == []
