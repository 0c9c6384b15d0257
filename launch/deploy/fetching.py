"""Brings what a run wrote on its hosts to a machine that only watches it."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from distflow.launch.deploy.fan_out import Fleet, Ways
from distflow.launch.deploy.hostfile import Host
from distflow.launch.run.record import FILE_NAME, FINAL, RunRecord, read_record

PATTERNS = (FILE_NAME, "metrics/*.jsonl", "workers/*.failure.json")
FETCH_S = 120.0


def fetch_record(hosts: Sequence[Host], ways: Ways, run_dirs: Mapping[int, Path], head_dir: Path) -> RunRecord | None:
    """Copy metrics, failures and the record into `head_dir`; returns the record, None if no host gives one.

    Hosts that cannot be reached are left out; the record of a run that is over goes before one that is not.
    """
    with Fleet(dict(enumerate(hosts)), ways, nonce="") as fleet:
        fleet.open()
        given = {n: {"folder": str(run_dirs[n]), "patterns": PATTERNS} for n in fleet.reached}
        answers, _ = fleet.ask("read", given, limit_s=FETCH_S)
    records = []
    for answer in answers.values():
        files = {name: base64.b64decode(text) for name, text in answer["files"].items()}
        if FILE_NAME in files:
            records.append(json.loads(files.pop(FILE_NAME)))
        for name, content in files.items():
            path = head_dir / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
    if not records:
        return None
    best = max(records, key=lambda record: record["state"] in FINAL)
    draft = head_dir / f".{FILE_NAME}.fetched"
    draft.write_text(json.dumps({**best, "run_dir": str(head_dir)}, indent=1) + "\n")
    draft.replace(head_dir / FILE_NAME)
    return read_record(head_dir)
