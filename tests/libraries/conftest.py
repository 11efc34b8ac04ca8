"""What tests of several libraries begin with."""

import pytest


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """A process group of this process alone."""
    import torch.distributed as dist

    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def installed(request):
    """What install() of the `adapter` that a file tests returns; undone behind each test."""
    made = request.module.adapter.install(backend="staged")
    yield made
    made.close()
    made.uninstall()
