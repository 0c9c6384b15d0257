"""Entry point of a worker process: read its document, compile the recipe into a script, run it, report how it ended.

`python -m distflow.runtime.main DOCUMENT INCARNATION` runs one worker in this process. That is how a pool's own Python
is started: it needs none of the packages that only the command line imports.
"""

from __future__ import annotations

import json
import linecache
import os
import platform
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from distflow import log
from distflow.comm.addresses import ensure_socket_dir, leave_socket_dir
from distflow.comm.processes import name_process
from distflow.errors import DeviceFault, DistflowError, RunStopped, StepError, TermEnded, UserError, device_fault
from distflow.flow.document import read_worker_document
from distflow.flow.file_import import scope_in
from distflow.flow.script import render_script
from distflow.runtime.assembly import Setting, read_setting
from distflow.runtime.disk import FAILURE_ROOM, replace_file, spare_output, write_last
from distflow.runtime.process_record import arm
from distflow.runtime.session import Session
from distflow.runtime.steps import split, user_code
from distflow.runtime.worker import Worker
from distflow.types import WorkerName

DONE, STOPPED = 0, 130


CURE_OF_GPU = (
    "look at it with `nvidia-smi -q` and `dmesg`; to go on without it, leave it out of CUDA_VISIBLE_DEVICES and resume "
    "the run with fewer workers on its host"
)
SWITCH_S = 5e-4
"""How long a thread that handles messages or writes dumps may keep the main one from going on, which gives Python up in
each operation of torch. Python's own 5 ms are as long as a decode step of a small model."""


def run_worker(document: Path, incarnation: int) -> int:
    """Run the worker described by `document`, for the `incarnation`th time from 0; returns its exit code.

    0 done, 2 the user's recipe or plug-in, 3 failed for good, 130 stopped, 75 to be started again in another term, 71 a
    GPU has failed, 1 an internal error. A failure is also written to `<run>/workers/<pool>-<i>.failure.json`.
    """
    try:
        found = read_worker_document(document)
    except UserError as error:
        print(f"{document}: {error}", flush=True)
        return error.exit_code
    stem = WorkerName.parse(found.worker).file_stem
    run_dir = Path(found.run_dir)
    spare_output()
    log.configure(found.worker)
    # Here, because only this process is the worker, however it was started.
    arm(run_dir / "logs" / f"{stem}.stacks")
    name_process(f"distflow {run_dir.name} {found.worker}")
    log.logger(__name__).info("executed by %s, Python %s", sys.executable, platform.python_version())
    try:
        setting = read_setting(found, document)
        torch.set_num_threads(setting.me.threads)
        sys.setswitchinterval(SWITCH_S)
        script = _compile(setting, document)
        ensure_socket_dir(setting.run_dir, setting.document.host)
        Session(setting, incarnation).run(script)
    except RunStopped as stopped:
        log.logger(__name__).info("stopped: %s", stopped)
        return STOPPED
    except TermEnded as ended:
        log.logger(__name__).info("%s", ended)
        return TermEnded.exit_code
    except Exception as error:
        # The top of a worker: whatever ended it is recorded, then reported by the exit code.
        return _report(error, run_dir / "workers" / f"{stem}.failure.json", found.worker)
    return DONE


def run_by_hand(document: Path, incarnation: int) -> int:
    """Run a worker that was not started by an agent, and clean up after it, also when it is interrupted.

    Returns its exit code.
    """
    found = read_worker_document(document)
    # As by default, but after cleaning up.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.unraisablehook = _exit_again
    try:
        return run_worker(document, incarnation)
    finally:
        leave_socket_dir(Path(found.run_dir), found.host)


def _exit_again(lost: sys.UnraisableHookArgs) -> None:
    """Send the signal again whose exit was lost, as what is raised while Python collects garbage is."""
    if issubclass(lost.exc_type, SystemExit):
        os.kill(os.getpid(), signal.SIGTERM)
    else:
        sys.__unraisablehook__(lost)


def _compile(setting: Setting, document: Path) -> Callable[[Worker], None]:
    """The worker's script as a function: rendered into the run folder, unless the document or the layout names a file.

    Exceptions of a user's own script become StepErrors.
    """
    stem = setting.me.name.file_stem
    if setting.document.script is None:
        path = setting.run_dir / "workers" / f"{stem}.py"
        text = render_script(setting.plan, setting.me.name)
        _record_script(path, text)
        if setting.me.script is None:
            return _execute(text, path, stem)
        # The run folder keeps a copy; messages name the user's file.
        path = Path(setting.me.script)
    else:
        path = document.parent / setting.document.script
    script = _read_script(path, stem)
    what = f"script {path} on {setting.me.name}"

    def run(worker: Worker) -> None:
        with user_code(what):
            script(worker)

    return run


def _record_script(path: Path, text: str) -> None:
    """Let people read what this worker executes, if the disk has room for it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text() != text:
            replace_file(path, text)
    except OSError as error:
        log.logger(__name__).error("could not write the script into the run folder, continuing without it: %s", error)


def _read_script(path: Path, stem: str) -> Callable[[Worker], None]:
    try:
        source = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"script: {path} cannot be read: {error.strerror}") from error
    return _execute(source, path, stem)


def _execute(source: str, path: Path, stem: str) -> Callable[[Worker], None]:
    linecache.checkcache(str(path))
    scope = {"__name__": f"distflow_script_{stem.replace('-', '_')}", "__file__": str(path), **scope_in(path.parent)}
    try:
        code = compile(source, str(path), "exec")
    except SyntaxError as error:
        raise UserError(f"{path}:{error.lineno}: the script is not valid Python: {error.msg}") from error
    with user_code(f"script {path}, before script(w) was called"):
        exec(code, scope)
    if "script" not in scope or not callable(scope["script"]):
        raise UserError(f"{path}: expected a function `script(w)`; `distflow plan RECIPE --worker NAME` prints one")
    script: Callable[[Worker], None] = scope["script"]
    return script


def _report(error: Exception, path: Path, worker: str) -> int:
    fault = device_fault(error)
    code = DeviceFault.exit_code if fault else error.exit_code if isinstance(error, DistflowError) else 1
    text = "".join(traceback.format_exception(error))
    if isinstance(error, StepError):
        frames, message = split(error)
    else:
        frames = text
        message = str(error) if isinstance(error, DistflowError) else traceback.format_exception_only(error)[-1].strip()
    if fault:
        message = f"the GPU failed ({fault}): {message} — {CURE_OF_GPU}"
    failure = {
        "worker": worker,
        "exit_code": code,
        "error": DeviceFault.__name__ if fault else type(error).__name__,
        "message": message,
        "traceback": frames,
    }
    log.logger(__name__).error("%s", text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_last(path.parent.parent, FAILURE_ROOM, lambda: replace_file(path, json.dumps(failure, indent=1)))
    except OSError as refused:
        # The exit code still reports it, and so does the log if it has room.
        log.logger(__name__).error("could not write %s: %s", path, refused)
    return code


if __name__ == "__main__":
    sys.exit(run_by_hand(Path(sys.argv[1]), int(sys.argv[2])))
