"""A stand-in for a worker, for tests of launching: no torch, no model, starts in milliseconds.

Its document is a worker's YAML; `settings.engine_options.fake` and `settings.backend_options.fake` set its behaviour:
`steps` (training steps it pretends to make), `step_s`, `first` (step to begin at), `until` (training ends before that,
once a file with this path exists), `fail_at` (step) and `how` (raise |
exit:N | leave:N, which skips all clean-up | signal:N) in its first incarnation, `stubborn` (ignores stop and SIGTERM),
`held_by` (after a stop, exits only once a file with this path exists, like a worker that saves), `saves_s` (after a
stop, saves for so many seconds, and tells its agent how far it is), `helper` (starts a child process), `hog` (keeps
the interpreter lock forever), `waits` (name, peers and seconds, to show in its status). A training worker counts steps
and writes metrics; the others wait to be stopped or drained.
"""

from __future__ import annotations

import itertools
import json
import os
import queue
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from distflow.comm.endpoint import Endpoint
from distflow.comm.keys import NetworkListener, key_file, read_keys
from distflow.comm.message import Message
from distflow.runtime.process_record import arm, thread_stacks
from distflow.types import WorkerName

ASKED_TO_STOP = 130
FINISHED = "finished"
DRAINED = "drained"
HERE_S = 1.0
HELD_S = 60.0
SAVED_EVERY_S = 0.2


@dataclass(slots=True)
class FakeWorker:
    """One incarnation of a fake worker."""

    document: Mapping[str, Any]
    incarnation: int
    inbox: queue.SimpleQueue[Message]
    endpoint: Endpoint
    step: int = 0
    listed: bool = False
    """Whether a roster that names this worker has arrived."""
    here_at: float = 0.0

    @property
    def name(self) -> WorkerName:
        """This worker's name."""
        return WorkerName.parse(self.document["worker"])

    @property
    def run_dir(self) -> Path:
        """The run folder."""
        return Path(self.document["run_dir"])

    def behave(self) -> int:
        """Run; returns the exit code."""
        behaviour = self._behaviour()
        self.step = int(behaviour.get("first", 1)) - 1
        if "helper" in behaviour:
            subprocess.Popen(["sleep", "600"])
        if behaviour.get("hog"):
            hog_the_lock()
        if behaviour.get("stubborn"):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        trains = self.name.pool in ("trainer", "worker")
        while not trains or self._trains_on(behaviour):
            why = self._asked_to_stop(float(behaviour.get("step_s", 0.02)))
            if why is not None and not behaviour.get("stubborn"):
                self._save(float(behaviour.get("saves_s", 0.0)))
                await_file(behaviour.get("held_by"))
                return 0 if why in (FINISHED, DRAINED) else ASKED_TO_STOP
            self.step += 1
            if trains:
                self._write_metrics()
            if self.incarnation == 0 and self.step == behaviour.get("fail_at"):
                return self._fail(str(behaviour["how"]))
        for peer in self.endpoint.roster:
            if not peer.startswith("agent/") and peer != str(self.name):
                self.endpoint.send(peer, "stop", {"reason": FINISHED})
        return 0

    def _trains_on(self, behaviour: Mapping[str, Any]) -> bool:
        until = behaviour.get("until")
        return self.step < int(behaviour["steps"]) and not (until is not None and Path(until).exists())

    def _behaviour(self) -> Mapping[str, Any]:
        settings = self.document["settings"]
        merged: dict[str, Any] = {}
        for options in ("engine_options", "backend_options"):
            merged |= (settings.get(options) or {}).get("fake", {})
        return merged

    def _asked_to_stop(self, seconds: float) -> str | None:
        """Answer messages for a while; returns the reason as soon as this worker is told to stop."""
        end = time.monotonic() + seconds
        self._say_where()
        while (left := end - time.monotonic()) > 0:
            try:
                message = self.inbox.get(timeout=left)
            except queue.Empty:
                return None
            if message.kind == "status":
                self.endpoint.reply(message, self._status())
            elif message.kind == "stacks":
                self.endpoint.reply(message, {"waits": self._waits(), "threads": thread_stacks()})
            elif message.kind == "lost":
                print("lost", json.dumps(dict(message.body)), flush=True)
            elif message.kind == "roster":
                self._learn(message.body["addresses"])
            elif message.kind == "drain":
                return DRAINED
            elif message.kind == "stop":
                return str(message.body["reason"])
        return None

    def _say_where(self) -> None:
        """Report the address to the agent until it is known, as every worker of a run on many hosts does."""
        address = self.endpoint.network_address
        if address is not None and not self.listed and time.monotonic() - self.here_at > HERE_S:
            self.here_at = time.monotonic()
            self.endpoint.send(f"agent/{self.document['host']}", "here", {"address": address})

    def _learn(self, addresses: Mapping[str, str]) -> None:
        self.listed = self.listed or str(self.name) in addresses
        for name in sorted(addresses):
            if name not in self.endpoint.roster or self.endpoint.roster[name] != addresses[name]:
                print(f"knows {name} {addresses[name].partition(':')[0] or 'nowhere'}", flush=True)
                self.endpoint.know(name, addresses[name])

    def _save(self, seconds: float) -> None:
        end, written = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            written += 1 << 30
            self.endpoint.send(f"agent/{self.document['host']}", "checkpointed", {"bytes": written})
            time.sleep(SAVED_EVERY_S)

    def _status(self) -> dict[str, Any]:
        row = {"name": str(self.name), "pid": os.getpid(), "host": socket.gethostname(), "state": "running"}
        waits = self._waits()
        told = waits[0]["description"] if waits else None
        return {**row, "step": self.step, "version": self.step, "waiting_for": told, "waits": waits}

    def _waits(self) -> list[dict[str, Any]]:
        return [
            {**wait, "description": f"{wait['name']} from {', '.join(wait['peers'])} for {wait['seconds']:.1f} s"}
            for wait in self._behaviour().get("waits", [])
        ]

    def _write_metrics(self) -> None:
        line = {"step": self.step, "term": self.document["term"], "critic/score/mean": 0.5, "timing_s/step": 0.25}
        with (self.run_dir / "metrics" / f"{self.name.file_stem}.jsonl").open("a") as file:
            file.write(json.dumps({**line, "critic/score/mean.weight": 8}) + "\n")

    def _fail(self, how: str) -> int:
        if how.startswith("exit:"):
            return int(how.removeprefix("exit:"))
        if how.startswith("leave:"):
            os._exit(int(how.removeprefix("leave:")))
        if how.startswith("signal:"):
            os.kill(os.getpid(), int(how.removeprefix("signal:")))
        told = {"worker": str(self.name), "exit_code": 3, "error": "StepError", "message": "step 'bonus' raised"}
        path = self.run_dir / "workers" / f"{self.name.file_stem}.failure.json"
        path.write_text(json.dumps({**told, "traceback": "File bonus.py, line 3\nZeroDivisionError"}))
        return 3


def await_file(path: str | None) -> None:
    """Wait until the file exists, at most `HELD_S` seconds."""
    deadline = time.monotonic() + HELD_S
    while path is not None and not Path(path).exists() and time.monotonic() < deadline:
        time.sleep(0.02)


def hog_the_lock() -> None:
    """Stay in C code holding the interpreter lock, far longer than any test: no other thread runs again."""
    sum(itertools.repeat(0, 1 << 60))


def run_worker(document: Path, incarnation: int) -> int:
    """Entry point with the signature of the real one."""
    content = yaml.safe_load(document.read_text())
    inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
    keys = key_file(Path(content["run_dir"]))
    listener = None if content["address"] is None else NetworkListener(content["address"], read_keys(keys))
    endpoint = Endpoint(content["worker"], incarnation, content["roster"], listener=listener)
    endpoint.start(inbox.put)
    stem = WorkerName.parse(content["worker"]).file_stem
    arm(Path(content["run_dir"]) / "logs" / f"{stem}.stacks")
    print(f"{content['worker']} incarnation {incarnation} is up", flush=True)
    try:
        return FakeWorker(content, incarnation, inbox, endpoint).behave()
    finally:
        endpoint.close()
