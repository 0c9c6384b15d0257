"""Rounds of faults: a run with 3 rollouts and 2 trainers, to whose processes something happens at random moments.

    python -m tests.e2e.faults --rounds 200 [--seed 0]    a line a round; exit code 1 if one did not pass

A round passes if the run completes, every position was trained once, and nothing is left. What happens is drawn from
the seed; when, is counted in training steps or in seconds from the launch: one seed has more than one history.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.e2e.runs import Run

STEPS = 100
SETTINGS = [
    "layout=async",
    "layout.max_staleness=2",
    "layout.pools.rollout.count=3",
    "layout.pools.trainer.count=2",
    "run.save_every=10",
    "limits.restarts=20",
]
ROLLOUTS, TRAINERS = ("rollout/0", "rollout/1", "rollout/2"), ("trainer/0", "trainer/1")
OTHERS = ("agent/0", "nursery/0", "launch")
WORKERS = (*ROLLOUTS, *TRAINERS)
PAUSE_S = 10.0
EARLY_S = 5.0
ROUND_S = 400.0
DISK_MB = 256
CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

/* Seconds that the wall clock of this process is ahead: the number in a file that all processes have mapped. */
static volatile const long *ahead;

__attribute__((constructor)) static void look(void) {
    const char *path = getenv("JUMPING_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *found = mmap(NULL, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (found != MAP_FAILED) ahead = found;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(clock, now);
    if (!failed && clock == CLOCK_REALTIME && ahead) now->tv_sec += *ahead;
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    now->tv_sec = found.tv_sec;
    now->tv_usec = found.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now) {
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    if (now) *now = found.tv_sec;
    return found.tv_sec;
}
"""
"""A wall clock that jumps. (libfaketime 0.9.10 makes each `time.sleep` of Python 3.11 fail.)"""
HOUR = 3600


class Clock:
    """The wall clock of a run, if it can be made to jump here."""

    def __init__(self, folder: Path) -> None:
        self._file, library = folder / "ahead", folder / "clock.so"
        self.jump(0)
        self.environment: dict[str, str] = {}
        if shutil.which("cc") is not None:
            (folder / "clock.c").write_text(CLOCK)
            subprocess.run(["cc", "-shared", "-fPIC", "-o", library, folder / "clock.c", "-ldl"], check=True)
            self.environment = {"LD_PRELOAD": str(library), "JUMPING_CLOCK": str(self._file)}

    def jump(self, ahead_s: int) -> None:
        """From now on it is ahead of the true time by so much."""
        file = os.open(self._file, os.O_WRONLY | os.O_CREAT, 0o600)
        os.pwrite(file, struct.pack("=q", ahead_s), 0)
        os.close(file)


@dataclass(frozen=True)
class Fault:
    """What happens to whom, and when: so many seconds after the launch, or training steps after the fault before."""

    kind: str
    target: str
    after_s: float | None = None
    after_steps: int = 0

    def __str__(self) -> str:
        when = f"at {self.after_s:.1f} s" if self.after_s is not None else f"{self.after_steps} steps later"
        return f"{self.kind} {self.target} {when}"


@dataclass
class Round:
    """What is drawn from one seed."""

    seed: int
    faults: list[Fault] = field(default_factory=list)
    steps: int = STEPS

    @classmethod
    def drawn(cls, seed: int, kinds: tuple[str, ...]) -> Round:
        """Three faults; the first one often while the run still starts."""
        draw = random.Random(seed)
        faults: list[Fault] = []
        for number in range(3):
            # A disk that is still full at the end rightly fails the run: its last checkpoint cannot be written.
            kind = draw.choice([one for one in kinds if one != "disk" or number == 0])
            targets = {"disk": ("disk",), "clock": ("clock",), "SIGTERM": WORKERS}.get(kind, (*WORKERS, *OTHERS))
            killed = {fault.target for fault in faults if fault.kind == "SIGKILL"}
            target = draw.choice([one for one in targets if one != "launch" or one not in killed])
            if number == 0 and draw.random() < 0.5:
                faults.append(Fault(kind, target, after_s=draw.uniform(0.0, EARLY_S)))
            else:
                faults.append(Fault(kind, target, after_steps=draw.randint(1, 12)))
        # Nor may the run be over while it is full: it goes on training through it.
        return cls(seed, faults, steps=3 * STEPS if any(fault.kind == "disk" for fault in faults) else STEPS)


def kinds_here(without: Collection[str] = ()) -> tuple[str, ...]:
    """What can be made to happen on this machine."""
    found = ["SIGKILL", "SIGKILL", "SIGKILL", "SIGSTOP", "SIGTERM"]
    if os.geteuid() == 0 and shutil.which("mount"):
        found.append("disk")
    if shutil.which("cc"):
        found.append("clock")
    return tuple(kind for kind in found if kind not in without)


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A folder on a file system of its own, where that can be made."""
    folder.mkdir(parents=True, exist_ok=True)
    mounted = os.geteuid() == 0 and shutil.which("mount") is not None
    if mounted:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


class Faulty:
    """One run under faults."""

    def __init__(self, runs_dir: Path, name: str, clock: Clock, steps: int) -> None:
        self._steps = steps
        self._clock = clock
        self._began = time.monotonic()
        self._later: list[tuple[float, Callable[[], None]]] = []
        self._disk_was_full = False
        self._launch_killed = False
        self.run = Run(
            runs_dir,
            name,
            ["quickstart", f"run.training_steps={steps}", *SETTINGS],
            cold=True,
            environment={**os.environ, **clock.environment},
        )
        self.happened: list[str] = []

    def suffer(self, fault: Fault, steps: int) -> None:
        """Wait for the moment, and let it happen."""
        if fault.after_s is not None:
            self._until(lambda: time.monotonic() - self._began >= fault.after_s)
            # Nothing of the run is there to be hit before its agent is: the launch itself would be what is ended.
            self._until(lambda: self.run.pids_of("agent/0"))
        else:
            self._until(lambda: self.run.steps_done() >= steps + 2 * fault.after_steps)
        self._until(lambda: fault.target not in WORKERS or self.run.pids_of(fault.target))
        if not self._over():
            self._strike(fault)
            self.happened.append(f"{time.monotonic() - self._began:.1f} s: {fault.kind} {fault.target}")

    def end(self) -> None:
        """Wait for the end of the run; raises AssertionError with what is wrong with it."""
        self._until(lambda: self._over() and not self.run.processes())
        assert (self.run.folder / "run.json").exists(), f"the launch ended: {self.run.wait(30.0)}, {self.run.output}"
        record = self.run.record()
        assert record["state"] == "done", f"run.json says {record['state']}: {record['failure']}"
        if not self._launch_killed:
            while self._later:
                # The launch command may be the one that was stopped last.
                self._do_later()
                time.sleep(0.02)
            code = self.run.wait(30.0)
            assert code == 0, f"the launch command ended with {code}"
        self._check_positions()
        left = self.run.leftovers()
        assert left == [], f"left behind: {left}"

    def _check_positions(self) -> None:
        groups = Counter((*line["uid"], line["sample"]) for line in self.run.dumps())
        twice = [uid for uid, times in groups.items() if times > 1]
        assert not twice, f"trained twice: {twice[:3]} and {len(twice)} in all"
        if not self._disk_was_full:
            positions = {position for _, _, position, _ in groups}
            assert positions == set(range(self._steps * 32)), (
                f"{self._steps * 32 - len(positions)} positions were not trained"
            )
            assert len(groups) == self._steps * 32 * 8
            steps = [line["step"] for line in self.run.metrics() if "timing_s/step" in line]
            assert steps == list(range(1, self._steps + 1))

    def _over(self) -> bool:
        self._do_later()
        file = self.run.folder / "run.json"
        if file.exists():
            return self.run.record()["state"] in ("done", "failed", "stopped")
        return self.run.process.poll() is not None

    def _until(self, ready: Callable[[], object]) -> None:
        deadline = self._began + ROUND_S
        while not ready():
            self._do_later()
            if self._over() and not self.run.processes():
                return
            if not self._launch_killed and self.run.process.poll() is not None and not self.run.processes():
                return
            assert time.monotonic() < deadline, f"the run has not come to its end within {ROUND_S:g} s"
            time.sleep(0.02)

    def _do_later(self) -> None:
        now = time.monotonic()
        for moment, act in [due for due in self._later if due[0] <= now]:
            self._later.remove((moment, act))
            act()

    def _strike(self, fault: Fault) -> None:
        if fault.kind == "disk":
            self._fill_disk()
        elif fault.kind == "clock":
            self._clock.jump(random.choice((HOUR, -HOUR)))
        else:
            self._signal(fault)

    def _signal(self, fault: Fault) -> None:
        pids = [self.run.process.pid] if fault.target == "launch" else self.run.pids_of(fault.target)
        number = signal.Signals[fault.kind]
        self._launch_killed |= fault.target == "launch" and number == signal.SIGKILL
        for pid in pids[:1]:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        if number == signal.SIGSTOP:
            self._later.append((time.monotonic() + PAUSE_S, lambda: self._continue(pids[:1])))

    def _continue(self, pids: list[int]) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def _fill_disk(self) -> None:
        self._disk_was_full = True
        ballast = self.run.folder.parent / "ballast"
        with suppress(OSError), ballast.open("wb") as file:
            while True:
                file.write(bytes(1 << 16))
                file.flush()
        self._later.append((time.monotonic() + PAUSE_S, lambda: ballast.unlink(missing_ok=True)))


def suffer_round(plan: Round, folder: Path) -> list[str]:
    """One round; returns what happened. Raises AssertionError with what did not come out as it should."""
    with small_disk(folder / f"round-{plan.seed}") as runs_dir:
        faulty = Faulty(runs_dir, f"faults-{os.getpid()}-{plan.seed}", Clock(folder), plan.steps)
        try:
            steps = 0
            for fault in plan.faults:
                faulty.suffer(fault, steps)
                steps = faulty.run.steps_done()
            faulty.end()
        except AssertionError as error:
            keep = Path(tempfile.gettempdir()) / faulty.run.name
            shutil.copytree(faulty.run.folder, keep, dirs_exist_ok=True)
            story = f"{'; '.join(faulty.happened)}: {error} (its folder: {keep})"
            raise AssertionError(story) from None
        finally:
            faulty.run.end()
        return faulty.happened


def main() -> int:
    """Rounds from the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--without", nargs="*", default=[], help="kinds that are left out: disk, clock, SIGTERM, …")
    given = parser.parse_args()
    kinds = kinds_here(given.without)
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(given.seed, given.seed + given.rounds):
            begin = time.monotonic()
            try:
                told = f"passed: {'; '.join(suffer_round(Round.drawn(seed, kinds), Path(folder)))}"
            except AssertionError as error:
                failed += 1
                told = f"FAILED: {error}"
            print(f"round {seed}, {time.monotonic() - begin:.0f} s: {told}", flush=True)
    print(f"{given.rounds - failed} of {given.rounds} rounds passed", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
