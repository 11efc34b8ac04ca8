"""How often ranks meet on the host, from the construction of a layer until it has trained once."""

import pytest
import torch
import torch.distributed as dist
from driver_stub import tensors

from megamoe import MegaMoE
from megamoe.backends import select
from megamoe.testing import launch
from megamoe.window import window
from megamoe.window.allocators import Allocation


def allocate(nbytes, device, group):
    """Allocate a window in ordinary memory."""
    raw = torch.zeros(nbytes + 256, dtype=torch.uint8)
    memory = raw[-raw.data_ptr() % 256 :][:nbytes]
    return Allocation(memory, [memory.data_ptr()] * group.size, lambda: None)


def trained(rank, backend):
    group, (x, ids, scores) = dist.group.WORLD, tensors()
    counts = [group._get_sequence_number_for_group()]

    def count():
        counts.append(group._get_sequence_number_for_group() - sum(counts))

    layer = MegaMoE(272, 144, 6, 3, group=group, max_tokens=70, backend=backend, init_seed=1)
    count()
    x.requires_grad_()
    with torch.no_grad():
        layer(x, ids, scores)
    count()
    for _ in range(2):
        layer(x, ids, scores).sum().backward()
        count()
    layer.close()
    return counts[1:]


@pytest.mark.stub
@pytest.mark.parametrize(
    ("backend", "expected"),
    [("mega", [1, 3, 1, 0]), ("staged", [1, 1 + 3, 3 + 5, 3 + 5])],
)
def test_exchanges_until_a_layer_has_trained(monkeypatch, backend, expected):
    """Collectives of the group: in the constructor, the first call, the first step, and the next one."""
    monkeypatch.setattr(select, "why_not_mega", lambda *_: None)
    monkeypatch.setattr(window, "choose", lambda *_: allocate)
    assert launch(trained, 2, backend, timeout_s=60, start_method="fork") == [expected] * 2
