"""On a host of the tests, in place of `python -m distflow.launch.agent.agent`: an agent that the warm server forks.

`python warm_agent.py SOCKET ARGUMENTS…`. It is to the outside what the agent would be: signals go on to that, and it
ends as that ends. It is executed on its own, without the project's packages (see tests/warm_start).
"""

import json
import os
import signal
import socket
import sys
from contextlib import suppress


def main(door: str, arguments: list[str]) -> int:
    """Returns the agent's exit code."""
    request = {"module": "distflow.launch.agent.agent", "arguments": arguments, "cwd": os.getcwd()}
    request |= {"environment": dict(os.environ), "network": f"/proc/{os.getpid()}/ns/net", "python": None}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        line.connect(door)
        socket.send_fds(line, [json.dumps(request).encode()], [1, 2])
        agent = int(json.loads(line.recv(4096))["pid"])

        def pass_on(number: int, frame: object) -> None:
            with suppress(ProcessLookupError):
                os.kill(agent, number)

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, pass_on)
        code = int(json.loads(line.recv(4096))["code"])
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
