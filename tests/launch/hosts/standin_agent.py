"""A stand-in for `python -m distflow.launch.agent.agent`: opens its door, says its address, awaits `mesh.begin`, stays.

What it was told lies in `agents/<number>.json` of its run folder. `asked` there says that a launcher watches it, and
`ended` that it was told to leave.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
from pathlib import Path

from msgspec import structs

from distflow.comm.addresses import ensure_socket_dir, leave_socket_dir, worker_address
from distflow.comm.endpoint import Endpoint
from distflow.comm.keys import NetworkListener, key_file, read_keys
from distflow.launch.run.record import read_record


def main(run_dir: Path, number: int) -> int:
    if "DISTFLOW_TEST_REFUSE" in os.environ and os.environ["DISTFLOW_TEST_REFUSE"] == str(number):
        print("the stand-in agent refuses to start", flush=True)
        return 1
    record = read_record(run_dir)
    name = f"agent/{number}"
    inbox = queue.SimpleQueue()
    signal.signal(signal.SIGTERM, lambda number, frame: inbox.put(None))
    ensure_socket_dir(run_dir, number)
    listener = NetworkListener(record.hosts[number].address, read_keys(key_file(run_dir)))
    endpoint = Endpoint(name, 0, {name: worker_address(run_dir, name, number)}, listener=listener)
    endpoint.start(inbox.put)
    print(json.dumps({"agent": number, "address": endpoint.network_address}), flush=True)
    told = run_dir / "agents" / f"{number}.json"
    told.parent.mkdir(exist_ok=True)
    state = "starting"
    while (message := inbox.get(timeout=60)) is not None:
        if message.kind == "mesh.begin":
            workers = [entry.name for entry in record.workers if entry.host == number]
            told.write_text(json.dumps({**message.body, "workers": workers, "environment": dict(os.environ)}))
            state = "running"
            if number == 0:
                structs.replace(record, state=state).write()
        if message.kind == "status":
            told.with_suffix(".asked").touch()
            endpoint.reply(message, {"state": state, "hosts": {}, "roster": {}})
        if message.kind == "record":
            endpoint.reply(message, {"record": structs.replace(read_record(run_dir), state=state).as_text()})
        if message.kind in ("mesh.begin", "stop"):
            endpoint.reply(message, {"state": state})
        if message.kind == "stop":
            structs.replace(read_record(run_dir), state="stopped", exit_code=130).write()
            break
    endpoint.close()
    (run_dir / "agents" / f"{number}.ended").touch()
    leave_socket_dir(run_dir, number)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[sys.argv.index("--host") + 1])))
