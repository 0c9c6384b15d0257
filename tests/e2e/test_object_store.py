"""Checkpoints in a store of objects, by the real S3 protocol; run by the Python of `make trackers-venv`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.runs import SMALL, Launch, cli

for package in ("s3fs", "moto", "flask"):
    pytest.importorskip(package, reason=f"{package} is not installed: make trackers-venv")
pytestmark = pytest.mark.long


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An empty bucket of a store on this machine, which the workers find by the usual variables."""
    import s3fs
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    s3fs.S3FileSystem(skip_instance_cache=True).mkdir("bucket")
    yield "s3://bucket/runs"
    server.stop()


def test_a_run_is_copied_to_a_bucket_and_fetched_back(launch: Launch, bucket: str, tmp_path: Path) -> None:
    import s3fs

    keys = ("run.save_every=3", "run.keep_checkpoints=2", "run.training_steps=12", f"run.copy_to={bucket}")
    run = launch("quickstart", *SMALL, *keys, cold=True)
    assert run.wait() == 0, run.output
    found = s3fs.S3FileSystem(skip_instance_cache=True).find(f"{bucket}/{run.name}/checkpoints")
    kept = {path.split("/")[-2] for path in found if path.endswith("/COMMIT")}
    assert max(kept) == "step_000012"
    assert len(kept) <= 2
    fetched = cli("fetch", f"{bucket}/{run.name}", "--run", "again", "--runs-dir", str(tmp_path / "elsewhere"))
    assert fetched.returncode == 0, fetched.stderr
    again = ("--run", "again", "--runs-dir", str(tmp_path / "elsewhere"), "run.training_steps=14")
    resumed = cli("launch", "--resume", *again, timeout_s=180.0)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "resuming after training step 12" in resumed.stdout
