"""What tests of commands share."""

import pytest
import torch.distributed as dist


@pytest.fixture
def alone():
    """Let this process be the only rank of a group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()
