"""What tests of several libraries begin with."""

import sys

import pytest

MODELS = "vllm_models", "sglang_models", "megatron_models", "torchtitan_models"


def pytest_collection_finish():
    """Let the fork server import what these files have, not each rank: for vLLM and SGLang that takes 10 s."""
    from megamoe.testing.launch import PRELOADED

    PRELOADED.extend(name for name in MODELS if name in sys.modules)


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
