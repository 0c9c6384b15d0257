"""What the system and the driver say of this host's memory."""

import torch

from distflow.flow.memory_fit import GIB
from distflow.launch.deploy.machine_facts import capacity


def test_memory_of_this_host_and_its_gpus() -> None:
    found = capacity()
    assert found.host is not None
    assert found.host > GIB / 2
    # PyTorch may have been built without support for GPUs that are there.
    assert len(found.gpus) >= torch.cuda.device_count()
    assert all(size > GIB for size in found.gpus)
