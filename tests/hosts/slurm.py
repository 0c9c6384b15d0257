"""A Slurm of its own on this machine: munged, slurmctld and a slurmd for each node, in one folder and PID namespace.

    munged ── slurmctld ─┬─ slurmd n1 ── slurmstepd ── what a job runs
                         └─ slurmd n2 ── slurmstepd ── …

The nodes share everything with this machine but their process numbers: host name, addresses, file system, /dev/shm.
Their names n1 and n2 are Slurm's alone: nothing resolves them. Whatever is in the PID namespace ends with its first
process. Needs root and a Slurm that allows several slurmd on one machine, as Debian's does.
"""

from __future__ import annotations

import functools
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from tests.launch.conftest import REPOSITORY
from tests.polling import Patience, eventually

CLIENTS = ("sbatch", "scancel", "scontrol", "sinfo", "squeue", "srun")
DAEMONS = ("munged", "slurmctld", "slurmd")
BESIDE = ("slurmstepd:", ": slurmscriptd")
"""What the daemons start of their own, by title."""
# Were this process killed, unshare would be, and with it the namespace.
NAMESPACE = ("setpriv", "--pdeathsig", "KILL", "unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
START_S = 30.0
JOB_S = 240.0
CALL_S = 60.0
POLL_S = 0.05

CONFIGURATION = """\
ClusterName=distflow
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
# The nodes of a job meet at a port that goes by its number, and other clusters may run on this machine.
FirstJobId={first_job}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0
MpiDefault=none
MailProg=/bin/true
# A machine that is busy with other tests may stand still for longer than the default of 10 s.
MessageTimeout=60
TCPTimeout=30
# As many clusters have it, and bad for a run that outlives one of its nodes.
KillOnBadExit=1
WaitTime=5
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=10:00 State=UP
"""
INIT = """\
munged --foreground --force --socket={folder}/munge.socket --key-file={folder}/munge.key \\
    --pid-file={folder}/munged.pid --log-file={folder}/munged.log --seed-file={folder}/munged.seed &
for try in $(seq 200); do [ -S {folder}/munge.socket ] && break; sleep 0.05; done
slurmctld -D &
slurmd -D -N n1 &
slurmd -D -N n2 &
wait
"""


@functools.cache
def why_not() -> str | None:
    """Why there can be no Slurm here; None if there can."""
    if os.geteuid() != 0:
        return "needs root to run a Slurm of its own"
    lacking = [tool for tool in (*DAEMONS, *CLIENTS) if _tool(tool) is None]
    if lacking:
        return f"needs Slurm (packages slurmctld, slurmd, slurm-client, munge): no {', '.join(lacking)}"
    tried = subprocess.run([*NAMESPACE, "true"], capture_output=True, text=True, check=False)
    return None if tried.returncode == 0 else f"needs PID namespaces: {tried.stderr.strip()}"


class Slurm:
    """Use as a context: two idle nodes; when it is left, nothing of it runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._init: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Slurm:
        for name in ("state", "spool.n1", "spool.n2"):
            (self.folder / name).mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        host = socket.gethostname().partition(".")[0]
        text = CONFIGURATION.format(folder=self.folder, host=host, ports=_free_ports(3), first_job=os.getpid())
        (self.folder / "slurm.conf").write_text(text)
        command = [*NAMESPACE, "sh", "-c", INIT.format(folder=self.folder)]
        with (self.folder / "daemons.log").open("wb") as log:
            self._init = subprocess.Popen(command, stdout=log, stderr=log, env=self.environment())
        try:
            _await(self._idle, START_S, f"idle nodes: {self.folder}/*.log say why there are none")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        if self._init is not None:
            # With the first process of the namespace, which is a child of this one, all others in it are killed.
            for child in psutil.Process(self._init.pid).children():
                child.kill()
            self._init.wait(CALL_S)

    def environment(self) -> dict[str, str]:
        """Of a login node of this cluster."""
        # Were this process itself in a job, Slurm would go by that.
        plain = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "SRUN"))}
        path = f"{plain['PATH']}:/usr/sbin:/sbin"
        own = {"SLURM_CONF": str(self.folder / "slurm.conf"), "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        # What processes that Slurm kills leave there is nobody's worry.
        own["TMPDIR"] = str(self.folder)
        return {**plain, "PATH": path, **own}

    def call(self, *words: str) -> subprocess.CompletedProcess[str]:
        """A command on the login node, to its end."""
        return subprocess.run(
            words, capture_output=True, text=True, env=self.environment(), timeout=CALL_S, check=False
        )

    def job(self, number: str) -> dict[str, str]:
        """What Slurm says of a job: JobState, ExitCode and so on."""
        done = self.call("scontrol", "show", "job", "--oneliner", number)
        assert done.returncode == 0, done.stderr
        return dict(word.split("=", 1) for word in done.stdout.split() if "=" in word)

    def await_state(self, number: str, *states: str) -> dict[str, str]:
        """Wait until a job is in one of these states."""
        patience = Patience(JOB_S)
        while (job := self.job(number))["JobState"] not in states:
            assert not patience.over, f"waited {JOB_S:g} s for {' or '.join(states)}: {job}\n{self._said()}"
            time.sleep(POLL_S)
        return job

    def await_idle(self) -> None:
        """Wait until no job has anything on any node."""
        _await(self._idle, JOB_S, "idle nodes")

    def processes(self) -> list[str]:
        """Command lines of all that runs on the nodes, beside Slurm's own processes."""
        assert self._init is not None, "only inside of the context"
        first = psutil.Process(self._init.pid).children()[0]
        space = os.readlink(f"/proc/{first.pid}/ns/pid")
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                same = os.readlink(f"/proc/{process.pid}/ns/pid") == space and process.pid != first.pid
                title = " ".join(process.cmdline())
                if same and process.status() != psutil.STATUS_ZOMBIE and not title.startswith((*DAEMONS, *BESIDE)):
                    found.append(title)
        return found

    def _said(self) -> str:
        """The last words of the daemons, and what runs on the nodes."""
        logs = [f"{path.name}: {path.read_text()[-2000:]}" for path in sorted(self.folder.glob("slurm*.log"))]
        return "\n".join([*logs, *self.processes()])

    def _idle(self) -> bool:
        done = self.call("sinfo", "--noheader", "--Node", "--format=%T")
        return done.stdout.split() == ["idle", "idle"]


def _tool(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


def _free_ports(number: int) -> list[int]:
    """All held at once, so that they differ."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [int(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports


def _await(condition: Callable[[], bool], limit_s: float, what: str) -> None:
    eventually(condition, what, limit_s, POLL_S)
