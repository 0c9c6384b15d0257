"""The hub of Hugging Face where there is no network."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from distflow.config.hub import settle_hub
from distflow.launch.cli import run

LOADS = """
import os, sys
from distflow.data.files import read_hub
if "data alone" not in sys.argv:
    from distflow.workers.models import load_config
    from distflow.workers.tokenizers import PretrainedTokenizer
loads = {
    "model": lambda: load_config({"path": "owner/none", "init": None}),
    "tokenizer": lambda: PretrainedTokenizer("owner/none"),
    "data": lambda: read_hub("owner/none", lambda columns, where: None),
}
for what in sys.argv[1].split():
    if os.fork() == 0:  # as the first that looks for anything
        try:
            loads[what]()
        except Exception as error:
            print(f"{what}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(0)
    os.wait()
"""
"""Three ways to load, after one import, which takes longer than they do."""


def without_network(folder: Path, **more: str) -> dict[str, str]:
    """An environment whose hub refuses connections, with an empty cache."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    own = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    return {**own, "HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HOME": str(folder / "hub"), **more}


@pytest.mark.parametrize(("loaded", "offline"), [("model tokenizer data", ""), ("data", "1")])
def test_what_is_absent_is_told_at_once(tmp_path: Path, loaded: str, offline: str) -> None:
    environment = without_network(tmp_path, **({"HF_HUB_OFFLINE": offline} if offline else {}))
    words = [loaded, *(["data alone"] if loaded == "data" else [])]
    ended = subprocess.run(
        [sys.executable, "-c", LOADS, *words], env=environment, capture_output=True, text=True, check=False
    )
    for what in loaded.split():
        (told,) = (line for line in ended.stderr.splitlines() if line.startswith(f"{what}: UserError"))
        assert f"it is not in the cache, {tmp_path}/hub" in told
        assert ("HF_HUB_OFFLINE is set" if offline else "127.0.0.1 cannot be reached (Connection refused)") in told
        assert f"`hf download {'--repo-type dataset ' * (what == 'data')}owner/none` puts it there" in told
    assert "Retrying" not in ended.stderr


def test_a_launch_names_the_model_before_it_starts_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # Whether there is a network is found out once a process, and others may have asked in this one.
    monkeypatch.setattr("distflow.config.hub.settle_hub", settle_hub.__wrapped__)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1=", "answer": "1"}) + "\n")
    words = [
        "models.policy.path=owner/none",
        f"data.source={tmp_path}/rows.jsonl",
        "--runs-dir",
        str(tmp_path / "runs"),
    ]
    assert run(["launch", "quickstart", *words]) == 2
    told = capsys.readouterr().err
    assert "command line: models.policy.path — owner/none: it is not in the cache, " in told
    assert "HF_HUB_OFFLINE is set — where there is a network, `hf download owner/none`" in told
    assert not (tmp_path / "runs").exists()
