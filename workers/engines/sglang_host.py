"""The process that SGLang runs in, apart from the worker: SGLang kills its whole process tree when one part fails.

It is started by `sglang_process`, speaks `sglang_wire` over an inherited socket, and dies with the worker that started
it. All of SGLang's processes die with it: each asks the kernel to be killed with its parent.
"""

from __future__ import annotations

import ctypes
import inspect
import os
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from distflow.comm.processes import name_process
from distflow.errors import did_you_mean
from distflow.workers.engines.sglang_wire import Frames, Message, frame

CPU = "SGLANG_USE_CPU_ENGINE"
"""SGLang's own switch, passed to all its processes: use no GPU, even if there is one."""
_PR_SET_PDEATHSIG = 1
_CHUNK = 1 << 20
ATTENTION = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
"""Arguments that name one of SGLang's attention backends."""


def main(arguments: list[str]) -> None:
    """`arguments`: the socket's descriptor, the worker's process id, the title of this process."""
    descriptor, parent, title = arguments
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        return
    name_process(title)
    _ignore_interrupts()
    line = socket.socket(fileno=int(descriptor))
    frames = Frames()
    start: Message | None = None
    while start is None:
        data = line.recv(_CHUNK)
        if not data:
            return
        start = next(frames.feed(data), None)
    os.environ.update(start["env"])
    engine, answer = _engine(start)
    line.sendall(frame(answer))
    if engine is not None:
        # SGLang would exit on it.
        engine.loop.remove_signal_handler(signal.SIGTERM)
        _ignore_interrupts()
        from distflow.workers.engines.sglang_serving import Serving
        from distflow.workers.engines.sglang_updates import UPDATES

        manager = engine.tokenizer_manager
        updates = UPDATES[start["update_by"]](manager, start["args"]["tp_size"])
        engine.loop.run_until_complete(Serving(manager, updates, line, frames).serve())
        engine.shutdown()


def _ignore_interrupts() -> None:
    """Ctrl-C and, in a Slurm job, SIGTERM go to all processes; the worker decides when these end.

    Processes that SGLang starts inherit this.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _engine(start: Message) -> tuple[Any, Message]:
    """SGLang's engine, warmed up, or None, and the answer to the worker.

    Files by which SGLang's processes find each other (sockets, mostly) go to `folder`, which the worker removes.
    """
    prepare()
    tempfile.tempdir = start["folder"]
    try:
        import sglang
        from sglang.srt.managers.load_snapshot import shm_path_for
        from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES, ServerArgs

        args: Mapping[str, Any] = start["args"]
        known = inspect.signature(ServerArgs).parameters
        refused = refusal(f"SGLang {sglang.__version__}", args, known, ATTENTION_BACKEND_CHOICES)
        if refused is not None:
            return None, {"refused": refused}
        engine = sglang.Engine(model_path=start["folder"], **args)
        warm_up = {"max_new_tokens": 1, "temperature": 1.0}
        engine.generate(input_ids=[0], sampling_params=warm_up, return_logprob=True)
        # SGLang's processes count their load in shared memory that all of them have open now: unlink its name.
        Path(shm_path_for(engine.port_args.instance_id)).unlink(missing_ok=True)
    except Exception:
        # The top of this process: the worker reports why it has no engine.
        return None, {"broken": traceback.format_exc(limit=-8)}
    finally:
        tempfile.tempdir = None
    return engine, {"ready": sglang.__version__}


def refusal(title: str, args: Mapping[str, Any], known: Collection[str], attention: Sequence[str]) -> str | None:
    """Why the SGLang of this `title` would fail, but only after its start; None for arguments that it accepts."""
    unknown = sorted(set(args) - set(known))
    if unknown:
        return f"engine_options.args: {title} has no argument {', '.join(unknown)}"
    for name in ATTENTION:
        if name in args and args[name] not in (None, *attention):
            at = name if name == ATTENTION[0] else f"args.{name}"
            allowed = did_you_mean(str(args[name]), attention)
            return f"engine_options.{at} {args[name]!r}: {title} has no such backend — {allowed}"
    return None


def prepare() -> None:
    """Called in each process before it imports SGLang: processes that SGLang starts run this file first, too."""
    from distflow.workers.engines.loopback_store import stay_on_loopback

    stay_on_loopback()
    if os.environ[CPU] == "1":
        from distflow.workers.engines.sglang_cpu import install

        install()


if __name__ == "__main__":
    main(sys.argv[1:])
elif __name__ == "__mp_main__":
    prepare()
