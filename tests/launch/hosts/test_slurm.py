"""The batch script, its submission to a stand-in for sbatch, and the job that it then is."""

from __future__ import annotations

import json
import subprocess
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

import pytest

from distflow.comm.client import ask
from distflow.comm.keys import key_file, read_keys
from distflow.config.plugins import LIBRARIES, TRACKERS
from distflow.errors import UserError
from distflow.launch.cli import run as distflow
from distflow.launch.deploy import launcher as running
from distflow.launch.deploy.job_environment import job_size, render_job, slurm_settings
from distflow.launch.deploy.launch_request import Options, recipe_of
from distflow.launch.run.record import RunRecord, SubmittedJob, read_record
from tests.launch.conftest import await_that
from tests.launch.hosts.conftest import WAIT_S
from tests.launch.hosts.test_job_bootstrap import free_port
from tests.warm_start import WarmProcess

SBATCH = """#!/bin/sh
[ "$1" = --parsable ] || exit 9
if grep -q 'partition=none' "$2"; then echo "sbatch: error: invalid partition specified: none" >&2; exit 1; fi
echo "4711;cluster"
"""
SQUEUE = """#!/bin/sh
case "$*" in *--jobs=4711*) ;; *) exit 9 ;; esac
{answer}
"""
SRUN = """#!/bin/sh
while [ "${1#--}" != "$1" ]; do shift; done
for node in 0 1; do SLURM_NODEID=$node "$@" & done
wait
"""


def test_the_script_has_one_task_a_node_and_a_key_of_its_own(tmp_path):
    settings = slurm_settings(["nodes=4,time=2:00:00", "partition=gpu"])
    run_dir = tmp_path / "my run"
    text = render_job(settings, [(run_dir, ["python", "launch", "a=b c", "--env"])], Path("/here there"))
    assert text.splitlines() == [
        "#!/bin/bash",
        "#SBATCH '--job-name=distflow-my run'",
        "#SBATCH --open-mode=append",
        "#SBATCH --nodes=4",
        "#SBATCH --time=2:00:00",
        "#SBATCH --partition=gpu",
        "#SBATCH --ntasks-per-node=1",
        f"#SBATCH '--output={run_dir}/logs/slurm-%j.log'",
        "set -euo pipefail",
        "cd '/here there'",
        "# The secret shared by the nodes of this job; new for every job.",
        "DISTFLOW_RUN_KEY=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')",
        "export DISTFLOW_RUN_KEY",
        "exec srun --ntasks-per-node=1 --export=ALL --kill-on-bad-exit=0 --wait=0 python launch 'a=b c' --env",
    ]


def test_the_runs_of_a_sweep_are_an_array(tmp_path):
    runs = [(tmp_path / f"my {name}", ["python", "launch", f"run.seed={name}"]) for name in "01"]
    lines = render_job(slurm_settings(["nodes=1"]), runs, Path("/")).splitlines()
    assert "#SBATCH --array=0-1" in lines
    assert f"#SBATCH '--output={tmp_path}/my 0/logs/slurm-%A_%a.log'" in lines
    assert lines[-6:] == [
        'case "$SLURM_ARRAY_TASK_ID" in',
        f"0) run='{tmp_path}/my 0'; set -- python launch run.seed=0;;",
        f"1) run='{tmp_path}/my 1'; set -- python launch run.seed=1;;",
        "esac",
        'mkdir -p "$run/logs"',
        'exec srun --ntasks-per-node=1 --export=ALL --kill-on-bad-exit=0 --wait=0 "$@" >> "$run/$log" 2>&1',
    ]


def test_what_srun_does_not_take_from_sbatch_is_told_to_both():
    settings = slurm_settings(["nodes=2,cpus-per-task=8,no-kill=set,open-mode=truncate"])
    lines = render_job(settings, [(Path("/runs/100%j"), ["python"])], Path("/")).splitlines()
    assert {"#SBATCH --cpus-per-task=8", "#SBATCH --no-kill=set", "#SBATCH --open-mode=truncate"} < set(lines)
    assert "#SBATCH --output=/runs/100%%j/logs/slurm-%j.log" in lines
    assert lines[-1].endswith(" --wait=0 --cpus-per-task=8 --no-kill=set python")


@pytest.mark.parametrize(
    "words, message",
    [
        (["time=1:00"], "the number of nodes is missing — give it as --slurm nodes=4"),
        (["nodes=0"], "--slurm nodes=0: expected a whole number ≥ 1"),
        (["nodes=two,time=1:00"], "--slurm nodes=two: expected a whole number ≥ 1"),
        (["nodes=2-4"], "--slurm nodes=2-4: expected a whole number ≥ 1"),
        (["nodes=2,exclusive"], "--slurm exclusive: expected KEY=VALUE"),
        (["nodes=2", "ntasks=4"], "--slurm ntasks=4: the launcher sets this itself"),
        (["nodes=2", "array=0-3"], "--slurm array=0-3: the launcher sets this itself"),
        (["nodes=2,nodes=3"], "nodes is given twice"),
        (["nodes=2,comment=a\nb"], "expected KEY=VALUE"),
    ],
)
def test_settings_that_make_no_sense_are_refused(words, message):
    with pytest.raises(UserError, match=message):
        slurm_settings(words)


@pytest.mark.parametrize(
    "words, environment, each, together",
    [
        ("nodes=2,gpus-per-node=8", {}, 8, 16),
        ("nodes=3,gpus-per-node=h100:4", {}, 4, 12),
        ("nodes=2,gres=gpu", {}, 1, 2),
        ("nodes=2,gres=gpu:h100", {}, 1, 2),
        ("nodes=2,gres=gpu:4", {}, 4, 8),
        ("nodes=2,gres=gpu:1g.10gb:7", {}, 7, 14),
        ("nodes=2,gpus-per-task=6", {}, 6, 12),
        ("nodes=1,gpus=a100:5", {}, 5, 5),
        # How they are divided over the nodes is up to Slurm.
        ("nodes=2,gpus=12", {}, None, 12),
        ("nodes=2,gpus=12,gres=gpu:6", {}, 6, 12),
        ("nodes=2,gres=tmp:8", {}, None, None),
        ("nodes=2,gpus-per-node=0", {}, None, None),
        ("nodes=2,gres=none,mem=0", {}, None, None),
        ("nodes=2", {"SBATCH_GPUS_PER_NODE": "4"}, 4, 8),
        ("nodes=2,gres=gpu:4", {"SBATCH_GRES": "tmp:1,gpu:a:1,gpu:b:2"}, 3, 6),
    ],
)
def test_the_gpus_of_a_job_are_counted_from_the_options_of_sbatch(words, environment, each, together):
    size = job_size(slurm_settings([words]), environment)
    assert (size.gpus_each, size.gpus) == (each, together)


@pytest.mark.parametrize(
    "settings, overrides, said",
    [
        ("nodes=2,gres=gpu:1", [], "--slurm nodes=2,gres=gpu:1: slots — 3 workers, but the 2 hosts together have 2"),
        ("nodes=1,gpus=2", [], "--slurm nodes=1,gpus=2: slots — 3 workers, but node 0 has 2"),
        ("nodes=2,gpus=4", ["layout.pools.rollout.count=4"], "5 workers, but the 2 nodes together have 4"),
        (
            "nodes=2,gpus-per-node=2",
            ["layout.pools.rollout.hosts=[1]", "layout.pools.rollout.count=3"],
            "pool 'rollout' has 3 workers, but the hosts that it may run on (node 1) have 2",
        ),
    ],
)
def test_a_job_with_too_few_gpus_is_refused_before_it_is_submitted(tmp_path, capsys, settings, overrides, said):
    runs = tmp_path / "runs"
    job = ["launch", "quickstart", *overrides, "--runs-dir", str(runs), "--slurm", settings]
    for more in ([], ["--dry-run"]):
        assert distflow([*job, *more]) == 2
        assert said in capsys.readouterr().err
    assert not runs.exists()


@pytest.mark.parametrize("settings", ["nodes=3,gres=gpu:1", "nodes=2,gpus=3", "nodes=2", "nodes=1,gres=license:1"])
def test_a_job_with_enough_gpus_or_of_an_unknown_number_is_taken(tmp_path, capsys, settings):
    job = ["launch", "quickstart", "--runs-dir", str(tmp_path / "runs"), "--dry-run", "--slurm", settings]
    assert distflow(job) == 0
    assert capsys.readouterr().out.startswith("#!/bin/bash\n")


def launch(hosts, *arguments, **environment):
    command = ["launch", "quickstart", "--runs-dir", str(hosts.runs_dir), *arguments]
    done = WarmProcess("distflow.launch", command, environment=hosts.environment() | environment)
    out, err = done.communicate(timeout=WAIT_S)
    return done.returncode, out, err


def test_dry_run_prints_the_script_and_takes_no_name(hosts):
    code, out, _ = launch(hosts, "--slurm", "nodes=2", "--dry-run")
    assert code == 0
    assert "#SBATCH --nodes=2" in out
    assert not hosts.runs_dir.exists()


def test_a_pin_to_a_node_that_nobody_knows_yet_is_refused_before_the_job(hosts):
    job = ("--slurm", "nodes=2", "--dry-run")
    for pin, why in (
        ("gpu-1", "pin by number, as in layout.pools.trainer.hosts=[0]"),
        ("2", "no node 2 in a job of 2"),
    ):
        code, _, err = launch(hosts, f"layout.pools.trainer.hosts=[{pin}]", *job)
        assert (code, why in err) == (2, True), err
    code, out, _ = launch(hosts, "layout.pools.trainer.hosts=[1]", *job)
    assert (code, "layout.pools.trainer.hosts=[1]" in out) == (0, True)


def test_the_job_forwards_what_is_asked_for(hosts):
    code, out, _ = launch(hosts, "--slurm", "nodes=2", "--dry-run", "--forward", "HOME,PATH", "--ship-code")
    assert (code, "--ship-code --forward HOME,PATH\n" in out) == (0, True)
    code, _, err = launch(hosts, "--slurm", "nodes=2", "--dry-run", "--forward", "NO_SUCH_THING")
    assert (code, "--forward NO_SUCH_THING: not set here" in err) == (2, True)


def test_dry_run_of_a_resume_leaves_the_run_as_it_is(hosts):
    run_dir = hosts.runs_dir / "quickstart-2"
    run_dir.mkdir(parents=True, mode=0o755)
    RunRecord("quickstart-2", str(run_dir), 9, (), {}, 30.0, 3, state="stopped").write()
    code, out, _ = launch(hosts, "--slurm", "nodes=2", "--dry-run", "--resume")
    assert code == 0
    assert "--run quickstart-2" in out
    assert [path.name for path in run_dir.iterdir()] == ["run.json"]
    assert run_dir.stat().st_mode & 0o777 == 0o755


def test_without_sbatch_the_script_is_there_to_be_submitted_elsewhere(hosts):
    code, _, err = launch(hosts, "--slurm", "nodes=2", PATH=str(hosts.folder / "bin"))
    assert code == 2
    assert "sbatch not found" in err
    assert (hosts.runs_dir / "quickstart" / "slurm.sh").is_file()


def test_what_sbatch_says_is_passed_on(hosts):
    hosts._write("bin/sbatch", SBATCH)
    code, _, err = launch(hosts, "--slurm", "nodes=2,partition=none")
    assert (code, "invalid partition specified: none" in err) == (2, True)
    assert not hosts.runs_dir.exists()


@pytest.mark.parametrize(
    "sbatch, code, said",
    [
        ("echo 'sbatch: error: no such account' >&2; exit 1", 2, "rejected the job: sbatch: error: no such account"),
        ("echo 'Batch job submission failed'; exit 3", 2, "Batch job submission failed (exit code 3)"),
        ("exit 1", 2, "rejected the job: it said nothing (exit code 1)"),
        (
            "echo 'sbatch: error: Batch job submission failed: Unable to contact slurm controller' >&2; exit 1",
            2,
            "contact slurm controller (exit code 1) — submit it again when the cluster answers",
        ),
        ("echo 'Socket timed out on send/recv operation' >&2; exit 1", 2, "when the cluster answers (`sinfo`)"),
        ("echo what a day", 2, "sbatch named no job: what a day"),
        ("echo 'sbatch: warning: 90% of your hours are used' >&2; echo 4711", 0, "note: sbatch: warning: 90% of your"),
        ("echo Submitted batch job 4711", 0, ""),
    ],
)
def test_the_words_of_sbatch_are_shown_wherever_it_says_them(tmp_path, monkeypatch, capsys, sbatch, code, said):
    on_path(tmp_path, monkeypatch, sbatch=f"#!/bin/sh\n{sbatch}\n")
    assert distflow(["launch", "quickstart", "--slurm", "nodes=2", "--runs-dir", str(tmp_path / "runs")]) == code
    shown = capsys.readouterr()
    assert said in shown.err
    assert ("\njob 4711: " in shown.out) == (code == 0)
    assert (str(tmp_path / "runs" / "quickstart") in shown.out) == (code == 0)


@pytest.mark.parametrize(
    "words, said",
    [
        (["data.source=./no-such.parquet"], "data.source"),
        (["models.policy.path=./no-such-model"], "models.policy.path"),
        (["layout.pools.rollout.python=/no/such/python"], "layout.pools.rollout.python — /no/such/python: "),
        (["layout.pools.rollout.device=cuda"], "--slurm nodes=2: asks for no GPUs, which layout.pools.rollout.device"),
        (["layout.pools.rollout.engine=vllm"], "asks for no GPUs, which layout.pools.rollout.engine needs"),
        ([], ""),
    ],
)
def test_what_a_job_may_lack_is_told_before_it_is_submitted(tmp_path, monkeypatch, capsys, words, said):
    on_path(tmp_path, monkeypatch, sbatch="#!/bin/sh\necho no >&2; exit 1\n")
    assert distflow(["launch", "quickstart", *words, "--slurm", "nodes=2", "--runs-dir", str(tmp_path / "runs")]) == 2
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
    assert any(said in note for note in notes) == bool(said), notes


def test_a_library_that_the_python_of_a_job_lacks_is_told(tmp_path, monkeypatch, capsys):
    on_path(tmp_path, monkeypatch, sbatch=SBATCH)
    lacking = next(name for name, call in TRACKERS.items() if find_spec(LIBRARIES[call].module) is None)
    words = [f"run.trackers={{{lacking}: true}}", "--slurm", "nodes=2", "--runs-dir", str(tmp_path / "runs")]
    assert distflow(["launch", "quickstart", *words]) == 0
    assert f"note: command line: run.trackers.{lacking} — needs the package" in capsys.readouterr().err


def on_path(folder, monkeypatch, **commands):
    """Put stand-ins for commands of Slurm before all others."""
    (folder / "bin").mkdir(exist_ok=True)
    for name, text in commands.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:/usr/bin:/bin")


@pytest.mark.parametrize(
    "answer, state, said",
    [
        ("echo PENDING Resources", "queued", "queued; job 4711 is PENDING (Resources), submitted 0 min ago"),
        ("echo 'PENDING ReqNodeNotAvail, May be reserved'", "queued", "PENDING (ReqNodeNotAvail, May be reserved)"),
        ("echo RUNNING None", "not begun", "not begun; job 4711 is RUNNING, submitted"),
        ("echo CANCELLED None", "not begun", "not begun; job 4711 is CANCELLED"),
        ("echo STOPPED_IN_A_NEW_WAY None", "not begun", "not begun; job 4711 is STOPPED_IN_A_NEW_WAY"),
        ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", "not begun", "Slurm has no job 4711"),
        ("echo 'error: no controller' >&2; exit 1", "not begun", "squeue failed: error: no controller"),
    ],
)
def test_status_says_where_a_submitted_job_stands(tmp_path, monkeypatch, capsys, answer, state, said):
    runs = ["--runs-dir", str(tmp_path / "runs")]
    on_path(tmp_path, monkeypatch, sbatch=SBATCH, squeue=SQUEUE.format(answer=answer))
    assert distflow(["launch", "quickstart", "--slurm", "nodes=2", *runs]) == 0
    capsys.readouterr()
    for words in ([], ["quickstart"]):
        assert distflow(["status", *words, *runs]) == 0
        shown = capsys.readouterr().out
        assert said in shown
        assert ("rm -r" in shown) == any(over in answer for over in ("CANCELLED", "Invalid job id"))
    assert distflow(["status", "--json", *runs]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["run"], told["state"], told["job"]["number"]) == ("quickstart", state, "4711")
    for command in (["stop"], ["metrics", "quickstart"], ["launch", "--resume", "--run", "quickstart"]):
        assert distflow([*command, *runs]) == 2
        assert (
            f"job 4711 has not started this run yet — `distflow status {tmp_path / 'runs/quickstart'}`"
            in capsys.readouterr().err
        )


def test_status_of_a_stopped_run_says_that_a_job_will_go_on_with_it(tmp_path, monkeypatch, capsys):
    run_dir = tmp_path / "runs" / "stopped"
    run_dir.mkdir(parents=True)
    RunRecord("stopped", str(run_dir), 9, (), {}, 30.0, 3, state="stopped").write()
    SubmittedJob("4711", "log", 0.0).write(run_dir)
    for answer, said in (("echo PENDING Priority", True), ("exit 0", False)):
        on_path(tmp_path, monkeypatch, squeue=SQUEUE.format(answer=answer))
        assert distflow(["status", "--runs-dir", str(run_dir.parent)]) == 0
        assert ("job 4711 will go on with it: PENDING (Priority)" in capsys.readouterr().out) == said


def in_job(runs_dir, name, *words, **given):
    """The recipe that a job finds when it begins."""
    empty = dict.fromkeys((field.name for field in fields(Options)), None)
    lists = {name: () for name in ("sweep", "forward", "settings", "slurm")}
    flags = {"resume": False, "recipe_as_written": False, "prepared": True}
    recipe, *overrides = words
    asked = {"recipe": recipe, "overrides": tuple(overrides), "name": name, "runs_dir": runs_dir}
    return recipe_of(Options(**{**empty, **lists, **flags, **asked, **given}), need_files=False)[0]


@pytest.mark.parametrize("after", ["edited", "broken", "gone"])
def test_a_job_runs_the_recipe_as_it_was_when_it_was_submitted(tmp_path, monkeypatch, after):
    on_path(tmp_path, monkeypatch, sbatch=SBATCH)
    recipe, runs = tmp_path / "mine.yaml", tmp_path / "runs"
    lines = "defaults: [/quickstart, _self_]\nrun: {name: mine, training_steps: 7, stop_after: 3}\n"
    recipe.write_text(lines)
    words = [str(recipe), "batch.prompts=8", "run.seed=5"]
    assert distflow(["launch", *words, "--slurm", "nodes=2", "--runs-dir", str(runs)]) == 0
    if after == "gone":
        recipe.unlink()
    else:
        recipe.write_text(lines.replace("7", "9") if after == "edited" else "run: [")
    found = in_job(runs, "mine", *words)
    assert (found.recipe.run.training_steps, found.recipe.run.stop_after) == (7, 3)
    assert (found.recipe.batch.prompts, found.recipe.run.seed) == (8, 5)
    assert (found.source, found.overrides) == (recipe, ("batch.prompts=8", "run.seed=5"))


def test_a_job_that_resumes_with_the_recipe_as_written_reads_it_when_it_is_submitted(tmp_path, monkeypatch):
    on_path(tmp_path, monkeypatch, sbatch=SBATCH)
    recipe, runs = tmp_path / "mine.yaml", tmp_path / "runs"
    lines = "defaults: [/quickstart, _self_]\nrun: {name: mine, training_steps: 7}\n"
    recipe.write_text(lines)
    job = ["launch", str(recipe), "--slurm", "nodes=2", "--runs-dir", str(runs), "--run", "mine"]
    assert distflow(job) == 0
    RunRecord("mine", str(runs / "mine"), 7, (), {}, 30.0, 3, state="stopped").write()
    for steps in (8, 9):
        recipe.write_text(lines.replace("7", str(steps)))
        if steps == 8:
            assert distflow([*job, "--resume", "--recipe-as-written"]) == 0
    found = in_job(runs, "mine", str(recipe), resume=True, recipe_as_written=True)
    assert (found.recipe.run.training_steps, found.source) == (8, recipe)
    assert in_job(runs, "mine", str(recipe), resume=True).recipe.run.training_steps == 7


def test_a_script_that_cannot_be_written_leaves_the_name_free(tmp_path, monkeypatch, capsys):
    """The name of the script is too long for any disk."""
    monkeypatch.setattr(running, "SCRIPT", "x" * 300)
    assert distflow(["launch", "quickstart", "--slurm", "nodes=2", "--runs-dir", str(tmp_path / "runs")]) == 2
    error = capsys.readouterr().err
    assert "(File name too long) — free some space" in error
    assert "Traceback" not in error
    assert not (tmp_path / "runs").exists()


def test_a_submitted_script_runs_on_all_nodes_of_its_job(hosts):
    """srun is a stand-in that starts two tasks here; their agents are stand-ins too."""
    hosts._write("bin/sbatch", SBATCH)
    hosts._write("bin/srun", SRUN)
    code, out, err = launch(hosts, "limits.connect_s=30.0", "--slurm", "nodes=2")
    assert (code, err) == (0, "")
    run_dir = hosts.runs_dir / "quickstart"
    assert out.splitlines() == [
        str(run_dir),
        f"job 4711: {run_dir}/slurm.sh; its output goes to {run_dir}/logs/slurm-4711.log",
    ]
    script = run_dir / "slurm.sh"
    for term in range(2):
        run_job(hosts, script, run_dir)
        # Put back into the queue, it goes on.
        assert read_record(run_dir).term == term


def run_job(hosts, script, run_dir):
    for told in run_dir.glob("agents/*.json"):
        told.unlink()
    stand_in = f"-c \"import sys; sys.executable = '{hosts.python}'; from distflow.launch.cli import main; main()\""
    script.write_text(script.read_text().replace("-m distflow.launch", stand_in))
    job = {"SLURM_JOB_NODELIST": "n[1-2]", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment = hosts.environment() | job
    batch = subprocess.Popen(["bash", str(script)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    hosts.heads.append(batch)
    await_that(lambda: len(list((run_dir / "agents").glob("*.json"))) == 2, "mesh.begin at both agents")
    keys = read_keys(key_file(run_dir))
    for address in json.loads((run_dir / "agents" / "0.json").read_text())["agents"].values():
        assert ask(address, "stop", {"reason": "test"}, 5.0, keys) is not None
    out, _ = batch.communicate(timeout=WAIT_S)
    assert batch.returncode == 0, out
    assert f"{run_dir}\n" in out.decode()
