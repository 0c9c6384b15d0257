"""Everything distflow raises on purpose. Messages say what is wrong, where, what was expected, and what to do.

`exit_code` is what the command line returns: 2 for the user's recipe or arguments, 3 for a worker that failed for
good, 1 for an internal error.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass


class DistflowError(Exception):
    """Root of the tree."""

    exit_code = 1


class UserError(DistflowError, ValueError):
    """The recipe, the arguments or a user's plug-in is wrong."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a recipe: where (`file:line` or `command line`), the key, what is wrong, and what to do."""

    where: str
    key: str
    message: str
    hint: str = ""

    def __str__(self) -> str:
        hint = f" — {self.hint}" if self.hint else ""
        return f"{self.where}: {self.key} — {self.message}{hint}"


class Places:
    """Where the keys of a recipe, written with dots, come from: calling it gives `file:line`, or `command line`."""

    def __init__(self, place_of: Callable[[str], str]) -> None:
        self._place_of = place_of

    def __call__(self, key: str) -> str:
        """The place of a key, or of the nearest section above it."""
        return self._place_of(key)

    def newest(self, keys: Sequence[str]) -> str:
        """The key nearest to the user: on the command line, else in a file of theirs. Here, that is not known."""
        return keys[0]

    def removed(self, section: str) -> list[str]:
        """Keys right below a section that a later file or the command line took out of it. Here, none are known."""
        return []


class Problems(list[Problem]):
    """The problems found so far, of a recipe with these places."""

    def __init__(self, where: Callable[[str], str]) -> None:
        super().__init__()
        self.where = where if isinstance(where, Places) else Places(where)

    def add(self, key: str, message: str, hint: str = "", *, at: str | None = None, others: Sequence[str] = ()) -> None:
        """Add a problem of `key`, once; `at` is the key that was written, if that is another one.

        `others`: keys whose values have as much to do with it. The problem is that of the key nearest to the user.
        """
        if others:
            key, at = self.where.newest((key, *others)), None
        place = self.where(key if at is None else self.where.newest((at, key)))
        problem = Problem(place, key, message, hint)
        if problem not in self:
            self.append(problem)


class RecipeError(UserError):
    """All problems of one recipe at once."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        assert problems, "a RecipeError names at least one problem"
        self.problems = tuple(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)


class KeyedError(UserError):
    """Valid options do not go with another key of the recipe, which is named."""

    def __init__(self, key: str, message: str) -> None:
        self.key = key
        self.message = message
        super().__init__(key, message)

    def __str__(self) -> str:
        return f"{self.key} — {self.message}"


class PluginError(UserError):
    """A step, reward, engine, … named in the recipe cannot be found or has the wrong signature."""


class StepError(DistflowError):
    """A user's function raised; carries the step, the worker and the uids in hand."""

    exit_code = 3


class WorkerFailed(DistflowError):
    """A worker failed for good."""

    exit_code = 3


class ReplicaLost(WorkerFailed):
    """Another training worker is gone: this one cannot continue, but their pool may, from its last checkpoint."""

    exit_code = 75
    """Of the worker's process: a temporary failure, as sysexits.h has it."""


class DeviceFault(WorkerFailed):
    """A GPU has failed under a worker: the code is not to blame, and its process can do nothing more with that GPU."""

    exit_code = 71
    """Of the worker's process: an error of the system, as sysexits.h has it."""


class NoProgressError(WorkerFailed):
    """A named wait saw no progress within its limit."""


class ProtocolError(DistflowError):
    """A peer sent something malformed, oversized, or from another recipe."""

    exit_code = 3


class RecipeMismatch(ProtocolError):
    """Two workers were compiled from different recipes and must not work together."""


class ChecksumError(ProtocolError):
    """The bytes that arrived differ from those that were sent."""


class Overtaken(ChecksumError):
    """A version of the weights was overwritten by a newer one before it was read; the newer one is on its way."""


class RunStopped(DistflowError):
    """The run was asked to stop; unwinds a worker's script. Not a failure."""

    exit_code = 130


class TermEnded(DistflowError):
    """The training workers have saved and leave, so that others begin the next term; unwinds a worker's script."""

    exit_code = ReplicaLost.exit_code


class RunEnded(DistflowError):
    """The workers that own the samples have ended the run before its last training step; unwinds a worker's script."""


_DEVICE_FAULTS = (
    "uncorrectable ECC error",
    "uncorrectable NVLink error",
    "hardware stack error",
    "an illegal memory access",
    "an illegal instruction",
    "misaligned address",
    "unspecified launch failure",
    "launch timed out",
    "contained error",
    "device(s) is/are busy or unavailable",
    "GPU is lost",
    "unknown error",
    "CUBLAS_STATUS_EXECUTION_FAILED",
    "CUBLAS_STATUS_INTERNAL_ERROR",
)
"""What `cudaGetErrorString` and cuBLAS say of a GPU that has failed, or of a context that can do nothing more. What a
new process would only repeat is not among them: memory that is too small, arguments out of range, a failed assertion in
a kernel ("device-side assert triggered"), which is how PyTorch reports an index that is out of range."""
_OF_CUDA = ("CUDA error", "CUDA failure", "CUDA driver error", "HIP error")
"""How `torch.AcceleratorError`, other errors of PyTorch, and those of NCCL begin, in their own spelling or another."""


def device_fault(error: BaseException) -> str:
    """What a GPU reported, if that is what this error or one that it came from is about; else empty.

    An error of NCCL about another member of the group (`ncclRemoteError`) is not one of this worker's GPU.
    """
    seen: list[BaseException] = []
    last: BaseException | None = error
    while last is not None and last not in seen:
        seen.append(last)
        text = str(last)
        told = isinstance(last, RuntimeError) and any(word.lower() in text.lower() for word in _OF_CUDA)
        if told and "ncclRemoteError" not in text:
            fault = next((fault for fault in _DEVICE_FAULTS if fault.lower() in text.lower()), None)
            if fault is not None:
                return fault
        last = last.__cause__ or last.__context__
    return ""


def loop_cure(error: BaseException) -> str:
    """Say what to do about an error of asyncio's event loop, or of a missing or needless `await`; "" for any other."""
    text = str(error) if isinstance(error, RuntimeError | AttributeError | TypeError) else ""
    if text == "no running event loop":
        return "asyncio.run(…) around it gives a plain function an event loop; an `async def` reward function has one"
    if text == "asyncio.run() cannot be called from a running event loop":
        return "await it instead: an `async def` function runs on an event loop already"
    if not isinstance(error, RuntimeError) and re.search(r"'(coroutine|_asyncio\.(Future|Task))'", text):
        return "`await` is missing: in an `async def` step generate(…) and ctx.once(…) return what is to be awaited"
    if "can't be used in 'await' expression" in text:
        return "leave `await` out: in a plain `def` step generate(…) and ctx.once(…) return what is there"
    return ""


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name most similar to `name`, if one is similar enough: 1 is equal, 0 has nothing in common."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return found[0] if found else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`did you mean 'x'? allowed: x, y, z`."""
    names = sorted(known)
    close = nearest(name, names)
    guess = f"did you mean {close!r}? " if close is not None else ""
    return f"{guess}allowed: {', '.join(names) or '(nothing)'}"
