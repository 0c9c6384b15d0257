"""A page in Prometheus's text format with the newest value of every metric, for a server that scrapes it."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from distflow.flow.trackers import TrackedRun

PORT = 9464
TYPE = "text/plain; version=0.0.4; charset=utf-8"
_NO_NAME = re.compile(r"[^a-zA-Z0-9_]")


class Prometheus:
    """Serves `http://HOST:PORT/metrics`; `trackers/NAME/port` says on which port (0: a free one is taken)."""

    def __init__(self, run: TrackedRun, *, port: int = PORT, host: str = "127.0.0.1") -> None:
        self._label = run.name.replace("\\", "\\\\").replace('"', '\\"')
        self._values: dict[str, float] = {}
        self._lock = threading.Lock()
        tracker = self

        class Page(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = self.path.split("?")[0] in ("/metrics", "/")
                body = tracker.text().encode() if found else b"see /metrics\n"
                self.send_response(200 if found else 404)
                self.send_header("Content-Type", TYPE if found else "text/plain")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Requests are not news."""

        self._server = ThreadingHTTPServer((host, port), Page)
        self._server.daemon_threads = True
        (run.folder / "port").write_text(f"{self._server.server_address[1]}\n")
        threading.Thread(target=self._server.serve_forever, name="page", daemon=True).start()

    def text(self) -> str:
        """The page."""
        with self._lock:
            values = dict(self._values)
        lines = []
        for name, value in sorted(values.items()):
            lines += [f"# TYPE {name} gauge", f'{name}{{run="{self._label}"}} {_number(value)}']
        return "\n".join([*lines, ""])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See `Tracker`."""
        named = {f"distflow_{_NO_NAME.sub('_', name)}": float(value) for name, value in values.items()}
        at = "distflow_validated_step" if any(name.startswith("val/") for name in values) else "distflow_training_step"
        with self._lock:
            self._values |= {**named, at: float(step)}

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """There are no samples on this page."""

    def close(self) -> None:
        """See `Tracker`."""
        self._server.shutdown()
        self._server.server_close()


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return repr(value) if math.isfinite(value) else ("+Inf" if value > 0 else "-Inf")
