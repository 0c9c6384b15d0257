"""Run folders that an earlier version left, with checkpoints, are resumed by this one.

They are in `data/former_runs.tar.gz`: six steps of the quickstart with a smaller model, in three layouts, written by
the commit that `env.json` of each names. `expected/` holds the checkpoint that the same version wrote at step 8.
"""

import tarfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.runs import Launch

FORMER = Path(__file__).parent / "data" / "former_runs.tar.gz"
TOLERANCE = 1e-4
"""A tenth of one step of the optimizer: how a processor rounds may differ."""


@pytest.mark.parametrize("layout", ["one_process", "split", "divided"])
def test_a_run_folder_of_an_earlier_version_is_resumed(launch: Launch, tmp_path: Path, layout: str):
    name = f"{layout.replace('_', '-')}-{tmp_path.name[-6:].strip('_')}"
    with tarfile.open(FORMER) as archive:
        archive.extractall(tmp_path / "runs", [m for m in archive if m.name.startswith(layout)], filter="data")
    folder = (tmp_path / "runs" / layout).rename(tmp_path / "runs" / name)
    run = launch("--resume", "run.training_steps=8", name=name)
    assert run.wait() == 0, run.output
    assert "resuming after training step 6" in run.output
    assert [line["step"] for line in run.metrics()] == list(range(1, 9)), "of both launches"
    files = sorted((folder / "expected").glob("model-*.safetensors"))
    assert len(files) == (2 if layout == "divided" else 1)
    for file in files:
        expected, found = load_file(file), load_file(folder / "checkpoints" / "step_000008" / file.name)
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=0, atol=TOLERANCE, msg=key)
