"""An endpoint on the network in a process of its own, whose first message keeps it busy until it reads a line.

Run as `python -m tests.comm.slow_receiver FOLDER SENDER_ADDRESS`; it prints its address, then each message's number.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from distflow.comm.endpoint import Endpoint
from distflow.comm.keys import NetworkListener, key_file, read_keys
from distflow.comm.message import Message
from tests.polling import WAIT_S


def main(folder: Path, sender: str) -> None:
    roster = {"trainer/0": f"ipc://{folder}/trainer-0", "rollout/0": sender}
    endpoint = Endpoint("trainer/0", 0, roster, listener=NetworkListener("127.0.0.1", read_keys(key_file(folder))))

    def receive(message: Message) -> None:
        print(message.body["n"], flush=True)
        if message.body["n"] == 0:
            sys.stdin.readline()

    endpoint.start(receive)
    print(endpoint.network_address, flush=True)
    # Until it is killed; never for long if the test is.
    threading.Event().wait(3 * WAIT_S)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
