"""`launch --slurm`: a batch script whose tasks, one a node, are `launch --env`; and its submission."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from distflow.errors import UserError

SCRIPT = "slurm.sh"
SUBMIT_S = 60.0


class Refused(UserError):
    """Slurm does not take the job as it is, or there is none that it could take."""


_OURS = ("ntasks", "ntasks-per-node", "output", "error", "job-name")
_FOR_SRUN = ("cpus-per-task", "no-kill")
_STEP = ("--ntasks-per-node=1", "--export=ALL", "--kill-on-bad-exit=0", "--wait=0")
"""Whatever the cluster or --slurm export=… say: the tasks get the secret, and one that ends does not end the others."""
_KEY = re.compile(r"[a-z][a-z-]*")


def slurm_settings(words: Sequence[str]) -> dict[str, str]:
    """`nodes=4,time=2:00:00`, given once or several times: lines `#SBATCH --KEY=VALUE`; raises UserError."""
    found: dict[str, str] = {}
    for word in (part for text in words for part in text.split(",")):
        key, equals, value = word.strip().partition("=")
        if not equals or not value or not _KEY.fullmatch(key) or not value.isprintable():
            raise UserError(f"--slurm {word}: expected KEY=VALUE, an option of sbatch, such as nodes=4 or time=2:00:00")
        if key in _OURS:
            raise UserError(f"--slurm {word}: this is set by the launcher, one task a node — leave it out")
        if key in found:
            raise UserError(f"--slurm {word}: {key} is given twice — give it once")
        found[key] = value
    if "nodes" not in found or not found["nodes"].isdecimal() or int(found["nodes"]) < 1:
        raise UserError("--slurm: the number of nodes is missing — give it as --slurm nodes=4")
    return found


def render_job(settings: Mapping[str, str], run_dir: Path, command: Sequence[str], folder: Path) -> str:
    """The batch script: `command`, in `folder`, on every node of the job."""
    log = str(run_dir / "logs").replace("%", "%%") + "/slurm-%j.log"
    options = {
        "job-name": f"distflow-{run_dir.name}",
        # Put back into the queue, it goes on in the same log.
        "open-mode": "append",
        **settings,
        "ntasks-per-node": "1",
        "output": log,
    }
    # As sbatch sets them they do not reach srun, or not with every version of Slurm.
    again = [f"--{key}={options[key]}" for key in _FOR_SRUN if key in options]
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {shlex.quote(f'--{key}={value}')}" for key, value in options.items()),
            "set -euo pipefail",
            f"cd {shlex.quote(str(folder))}",
            "# What the nodes of this job know each other by; new for every job.",
            "DISTFLOW_RUN_KEY=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')",
            "export DISTFLOW_RUN_KEY",
            f"exec srun {shlex.join([*_STEP, *again, *command])}",
            "",
        ]
    )


def submit(script: Path) -> str:
    """Hand the script to sbatch; returns the job's number. Raises Refused with what sbatch says, UserError."""
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", str(script)], capture_output=True, text=True, timeout=SUBMIT_S, check=False
        )
    except FileNotFoundError:
        raise UserError(
            f"--slurm: there is no sbatch here — run this on a login node of the cluster, or submit {script} there"
        ) from None
    except subprocess.TimeoutExpired:
        raise UserError(f"--slurm: sbatch did not answer within {SUBMIT_S:g} s — try `sbatch {script}`") from None
    if done.returncode != 0:
        raise Refused(f"--slurm: sbatch refuses the job: {done.stderr.strip()} — correct the --slurm settings")
    return done.stdout.strip().partition(";")[0]
