"""How often ranks meet on the host, from the construction of a layer until it has trained once."""

import pytest

# Two ranks over gloo, whose CUDA driver is a stub, and whose windows lie in ordinary memory.
RANKS = """
import torch.distributed as dist
from megamoe import MegaMoE
from megamoe.backends import select as functional
from megamoe.testing import launch
from megamoe.window import window as windows
from megamoe.window.allocators import Allocation

class Local:
    def allocate(self, nbytes, device, group):
        raw = torch.zeros(nbytes + 256, dtype=torch.uint8)
        memory = raw[-raw.data_ptr() % 256 :][:nbytes]
        return Allocation(memory, [memory.data_ptr()] * group.size, lambda: None)

def trained(rank, backend):
    group, counts = dist.group.WORLD, []
    def count():
        counts.append(group._get_sequence_number_for_group())
    count()
    layer = MegaMoE(272, 144, 6, 3, group=group, max_tokens=70, backend=backend, init_seed=1)
    count()
    x = torch.zeros(5, 272, dtype=torch.bfloat16, requires_grad=True)
    ids, scores = torch.zeros(5, 3, dtype=torch.int64), torch.zeros(5, 3)
    with torch.no_grad():
        layer(x, ids, scores)
    count()
    layer(x, ids, scores).sum().backward()
    count()
    layer(x, ids, scores).sum().backward()
    count()
    layer.close()
    return [after - before for before, after in zip(counts, counts[1:])]
"""


@pytest.mark.parametrize(
    ("backend", "expected"),
    [("mega", [1, 3, 1, 0]), ("staged", [1, 1 + 3, 3 + 5, 3 + 5])],
)
def test_exchanges_until_a_layer_has_trained(run, backend, expected):
    """Collectives of the group: in the constructor, the first call, the first step, and the next one."""
    seen = run(f"""{RANKS}
with (
    on_cpu(),
    mock.patch.object(functional, "why_not_mega", lambda *_: None),
    mock.patch.object(windows, "choose", lambda *_: Local()),
):
    print(json.dumps(launch(trained, 2, {backend!r}, timeout_s=60, start_method="fork")))
""")
    assert seen == [expected] * 2
