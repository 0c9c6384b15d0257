"""Copies of checkpoints and Hugging Face folders at a second place: another folder, or a store that fsspec can reach.

    PLACE/RUN/recipe.yaml, run.json …        what `distflow fetch` needs besides to bring the run back
    PLACE/RUN/checkpoints/term_000001.json
    PLACE/RUN/checkpoints/step_000100/model-policy-trainer-0.safetensors …, COMMIT
    PLACE/RUN/checkpoints/step_000100/prompts/trainer-0.jsonl   where clients put prompts: those that there are by now
    PLACE/RUN/checkpoints/step_000100/copied_term_1_host_0      where several hosts copy: the parts of one are there
    PLACE/RUN/hf/step_000100/model.safetensors …, config.json

Each host copies the parts of its own training workers. The prompts of clients lie with each checkpoint, so that one
that is whole stays so while the next is copied. Whoever finds that all hosts have, writes COMMIT (two of them
write the same), so a folder with COMMIT is whole. Of a Hugging Face folder config.json comes last. Nothing is renamed:
stores of objects cannot.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import msgspec

from distflow.data.fed import PROMPTS
from distflow.log import logger
from distflow.runtime.checkpoint.commit import (
    COMMIT,
    COPIED,
    COPY_FAILED,
    Commit,
    Keeping,
    checkpoints_of,
    models_of,
    read_file,
    vanished,
)

RUN_FILES = ("recipe.yaml", "overrides.txt", "env.json", "run.json")
LAST_OF_MODEL = "config.json"
"""Without it, nothing takes the folder for a model."""
RETRY_S = (5.0, 15.0, 60.0, 300.0)
"""How long to wait before a copy that failed is tried again."""
LAST_TRIES = 3
"""How often the last one is tried once the run has ended, in a row."""
PENDING = 3
"""Checkpoints that wait to be copied, at most; where one host copies alone, only the newest does."""
_CHUNK = 8 << 20
Note = Callable[[int], None]
log = logger(__name__)


class SecondPlace:
    """One run at a second place, as one of its hosts sees it. Raises what the file system raises.

    `hosts`: number of the host of each training worker, by the stem of its files; `host`: this one's.
    """

    def __init__(self, url: str, run_dir: Path, keeping: Keeping, hosts: Mapping[str, int], host: int) -> None:
        self._fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        self._run_dir = run_dir
        self._root = f"{root.rstrip('/')}/{run_dir.name}"
        self._checkpoints = f"{self._root}/{checkpoints_of(run_dir).name}"
        self._models = f"{self._root}/{models_of(run_dir).name}"
        self._keeping = keeping
        self._hosts = hosts
        self._host = host

    @property
    def shared(self) -> bool:
        """Whether several hosts copy."""
        return len(set(self._hosts.values())) > 1

    def copy(self, folder: Path, note: Note) -> None:
        """Copy a whole checkpoint or model; `note` gets the bytes as they are copied."""
        if folder.parent == models_of(self._run_dir):
            self._copy_model(folder, note)
        else:
            self._copy_checkpoint(folder, note)

    def begun(self, folder: Path) -> bool:
        """Whether another host has copied its parts of this checkpoint."""
        return bool(self._marks(f"{self._checkpoints}/{folder.name}"))

    def _copy_checkpoint(self, folder: Path, note: Note) -> None:
        commit, fault = read_file(folder / COMMIT)
        if commit is None:
            raise FileNotFoundError(f"{folder}: {fault}")
        to, text = f"{self._checkpoints}/{folder.name}", (folder / COMMIT).read_bytes()
        if self._read(f"{to}/{COMMIT}") == text:
            return
        self._fs.makedirs(to, exist_ok=True)
        self._forget_commit(to, commit)
        for path, there in self._files(folder, commit, to):
            self._put(path, there, note)
        if self.shared:
            self._fs.pipe_file(f"{to}/{_mark(commit, self._host)}", b"")
        expected = {_mark(commit, self._host_of(name)) for name in commit.parts} if self.shared else set()
        if expected <= self._marks(to):
            self._check_sizes(to, commit)
            self._fs.pipe_file(f"{to}/{COMMIT}", text)
            for mark in self._marks(to):
                self._remove(f"{to}/{mark}")
            self._prune()

    def _files(self, folder: Path, commit: Commit, to: str) -> Iterator[tuple[Path, str]]:
        """What this host copies of a checkpoint, each with its place: all but COMMIT."""
        yield from ((folder / name, f"{to}/{name}") for name in commit.parts if self._host_of(name) == self._host)
        for path in (*(self._run_dir / name for name in RUN_FILES), *folder.parent.glob("term_*.json")):
            if path.is_file():
                below = self._root if path.parent == self._run_dir else self._checkpoints
                yield path, f"{below}/{path.name}"
        for path in sorted((self._run_dir / PROMPTS).glob("*.jsonl")):
            if self._host_of(f"-{path.name}") == self._host:
                yield path, f"{to}/{PROMPTS}/{path.name}"

    def _copy_model(self, folder: Path, note: Note) -> None:
        to = f"{self._models}/{folder.name}"
        self._remove(f"{to}/{LAST_OF_MODEL}")
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        for path in sorted(files, key=lambda path: path == folder / LAST_OF_MODEL):
            self._put(path, f"{to}/{path.relative_to(folder).as_posix()}", note)

    def _forget_commit(self, to: str, commit: Commit) -> None:
        """Take away what says that a checkpoint of an earlier term is whole there, before its parts are replaced."""
        there = self._decoded(self._read(f"{to}/{COMMIT}"))
        if there is None or there.term != commit.term:
            self._remove(f"{to}/{COMMIT}")

    def _check_sizes(self, to: str, commit: Commit) -> None:
        for name, (size, _) in commit.parts.items():
            found = self._fs.info(f"{to}/{name}")["size"]
            if found != size:
                raise OSError(f"{to}/{name} has {found} bytes there, COMMIT says {size}")

    def _prune(self) -> None:
        """Keep there what would be kept here; COMMIT is removed first. Unfinished ones before the newest go too."""
        steps = sorted(path for path in self._names(self._checkpoints) if path.startswith("step_"))
        commits = {name: self._decoded(self._read(f"{self._checkpoints}/{name}/{COMMIT}")) for name in steps}
        whole = {Path(name): commit for name, commit in commits.items() if commit is not None}
        gone = {path.name for path in self._keeping.superfluous(whole)}
        newest = max((path.name for path in whole), default="")
        for name in steps:
            if name in gone or (commits[name] is None and name < newest):
                self._remove(f"{self._checkpoints}/{name}/{COMMIT}")
                with suppress(FileNotFoundError):
                    self._fs.rm(f"{self._checkpoints}/{name}", recursive=True)

    def _host_of(self, part: str) -> int:
        # The name of one worker may end with that of another: big-trainer/0 and trainer/0.
        owners = [worker for worker in self._hosts if Path(part).stem.endswith(f"-{worker}")]
        # A worker that is gone may have written a part of the checkpoint that the run has resumed from.
        return self._hosts[max(owners, key=len)] if owners else 0

    def _marks(self, to: str) -> set[str]:
        return {name for name in self._names(to) if name.startswith("copied_term_")}

    def _names(self, folder: str) -> list[str]:
        try:
            return [str(path).rstrip("/").rpartition("/")[2] for path in self._fs.ls(folder, detail=False)]
        except FileNotFoundError:
            return []

    def _put(self, path: Path, to: str, note: Note) -> None:
        self._fs.makedirs(to.rpartition("/")[0], exist_ok=True)
        with path.open("rb") as source, self._fs.open(to, "wb") as target:
            while chunk := source.read(_CHUNK):
                target.write(chunk)
                note(len(chunk))

    def _read(self, path: str) -> bytes | None:
        try:
            return bytes(self._fs.cat_file(path))
        except FileNotFoundError:
            return None

    def _remove(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self._fs.rm_file(path)

    def _decoded(self, text: bytes | None) -> Commit | None:
        try:
            return None if text is None else msgspec.json.decode(text, type=Commit)
        except msgspec.DecodeError:
            return None


def _mark(commit: Commit, host: int) -> str:
    return f"copied_term_{commit.term}_host_{host}"


class Told(NamedTuple):
    """Whom the copies report to."""

    note: Note
    """Gets bytes as they are copied."""
    add: Callable[[str, float], None]
    """Takes the name of a metric and what to add to it."""
    hold: Callable[[Path], None]
    """Keeps a checkpoint here while it is copied or waits for that."""
    release: Callable[[Path], None]
    complain: Callable[[str], None]
    """Told at the end of the run what was not copied."""


class CopyThread:
    """Copies in the background, on a thread of its own, what it is offered; a newer checkpoint replaces one that waits.

    What fails is tried again after waits that grow, until a newer one takes its place. `alone`: no other host copies.
    """

    def __init__(self, make: Callable[[], SecondPlace], where: str, told: Told, *, alone: bool) -> None:
        self._make = make
        self._where = where
        self._told = told
        self._alone = alone
        self._place: SecondPlace | None = None
        self._now: Path | None = None
        """What is being copied."""
        self._waiting: list[Path] = []
        """Checkpoints, with the one that is being copied."""
        self._models: list[Path] = []
        self._failed = 0
        """Times in a row."""
        self._why = ""
        """What the last failure was."""
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._serve, name="copies", daemon=True)
        self._thread.start()

    def offer(self, folder: Path, *, model: bool = False) -> None:
        """Copy this, a whole checkpoint or a model, as soon as what is under way is done."""
        with self._changed:
            if model:
                self._models.append(folder)
            else:
                self._told.hold(folder)
                idle = [one for one in self._waiting if one != self._now]
                for older in idle[: len(idle) + 1 - (1 if self._alone else PENDING)]:
                    self._drop(older)
                self._waiting.append(folder)
            self._changed.notify_all()

    def close(self, limit_s: float, progress: Callable[[], int]) -> None:
        """Copy what is left, as long as no `limit_s` seconds pass without progress; the last tries are few."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        last = None
        while self._thread.is_alive() and (now := progress()) != last:
            last = now
            self._thread.join(limit_s)
        if self._thread.is_alive():
            self._tell_left()

    # -- the thread

    def _serve(self) -> None:
        while (folder := self._next()) is not None:
            try:
                if self._place is None:
                    self._place = self._make()
                self._place.copy(folder, self._told.note)
            except Exception as error:
                # Of a store's library, which raises what it likes.
                self._fail(folder, error)
            else:
                self._done(folder)

    def _next(self) -> Path | None:
        """What to copy next, when it is time for it; None: nothing is left, and the run has ended."""
        with self._changed:
            while not (self._waiting or self._models):
                if self._closing:
                    return None
                self._changed.wait()
            waiting = list(self._waiting)
        # Hosts that are not equally fast copy the same ones nevertheless. Asked without the lock, as it may take long.
        place = None if self._alone else self._place
        chosen = None if place is None else next((one for one in waiting if self._begun(place, one)), None)
        with self._changed:
            self._now = chosen or (self._waiting[-1] if self._waiting else self._models[0])
            for older in self._waiting[: self._waiting.index(self._now)] if self._now in self._waiting else ():
                self._drop(older)
            return self._now

    def _drop(self, folder: Path) -> None:
        self._waiting.remove(folder)
        self._told.release(folder)

    def _begun(self, place: SecondPlace, folder: Path) -> bool:
        try:
            return place.begun(folder)
        except Exception:
            # The copy itself will tell what is wrong.
            return False

    def _done(self, folder: Path) -> None:
        with self._changed:
            self._now = None
            if folder in self._waiting:
                self._drop(folder)
            elif folder in self._models:
                self._models.remove(folder)
        if self._failed:
            log.warning("copying to %s works again", self._where)
        self._failed, self._why = 0, ""
        self._told.add(COPIED, 1)
        log.info("copied %s to %s", folder, self._where)

    def _fail(self, folder: Path, error: Exception) -> None:
        with self._changed:
            self._now = None
            if folder in self._waiting and vanished(folder):
                # Another host that shares the folder has removed it: newer ones were written meanwhile.
                self._drop(folder)
                return
        self._failed += 1
        self._why = repr(error)
        self._told.add(COPY_FAILED, 1)
        if self._failed == 1:
            what = "training continues and it is tried again"
            log.error("could not copy %s to %s, %s: %r", folder, self._where, what, error)
        self._wait_to_retry()

    def _wait_to_retry(self) -> None:
        """Wait for the next try; a newer checkpoint is tried at once, and so is the last one, a few times."""
        with self._changed:
            if self._closing and self._failed >= LAST_TRIES:
                self._tell_left()
                for folder in list(self._waiting):
                    self._drop(folder)
                self._models.clear()
                return
            waiting, closing = list(self._waiting), self._closing
            deadline = time.monotonic() + (1.0 if closing else RETRY_S[min(self._failed, len(RETRY_S)) - 1])
            while (left_s := deadline - time.monotonic()) > 0:
                if waiting != self._waiting or closing != self._closing:
                    return
                self._changed.wait(left_s)

    def _tell_left(self) -> None:
        names = ", ".join(folder.name for folder in (*self._waiting, *self._models))
        text = f"not copied to {self._where} when the run ended: {names}"
        log.error("%s", text)
        self._told.complain(f"run.copy_to: {text}{f' — {self._why}' if self._why else ''}")


def start_copies(
    url: str, run_dir: Path, keeping: Keeping, hosts: Mapping[str, int], host: int, told: tuple[Any, ...]
) -> CopyThread:
    """The copies of one host of a run; `hosts` as in `SecondPlace`, `told` as in `Told`."""
    where, alone = f"{url.rstrip('/')}/{run_dir.name}", len(set(hosts.values())) <= 1
    return CopyThread(lambda: SecondPlace(url, run_dir, keeping, hosts, host), where, Told(*told), alone=alone)
