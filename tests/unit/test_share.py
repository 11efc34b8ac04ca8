"""Which SMs a launch takes beside other kernels: the default, what is stated, and how the launch is made."""

import pytest
import torch

from megamoe.backends.reserve import JOIN_NS, Share, share_of
from megamoe.memory.transport.group import Alone


class Ranks:
    rank, size, in_process = 0, 2, False


def test_a_launch_that_trains_beside_others_takes_what_is_free(monkeypatch):
    monkeypatch.delenv("MEGAMOE_RESERVE_SMS", raising=False)
    assert share_of(Ranks(), None) == Share(0, JOIN_NS)
    assert share_of(Alone(), None) == Share(0, 0)  # it waits for no other rank
    with torch.no_grad():
        assert share_of(Ranks(), None) == Share(0, 0)


def test_a_number_is_kept_and_then_a_launch_has_all_of_its_ctas(monkeypatch):
    monkeypatch.setenv("MEGAMOE_RESERVE_SMS", "12")
    assert share_of(Ranks(), None) == Share(12, 0)
    assert share_of(Ranks(), 0) == Share(0, 0)


@pytest.mark.parametrize("reserve_sms", [None, 20])
def test_only_a_launch_with_all_of_its_ctas_is_cooperative(run, reserve_sms):
    seen = run(f"""
class Ranks:
    rank, size, in_process = 0, 1, False
    def all_gather(self, value): return [value]
    def barrier(self): pass
with on_cpu():
    found, share = [], {reserve_sms!r}
    layer = mega.MegaBackend(problem, Ranks(), window=Window(problem, device="cpu"), reserve_sms=share)
    call(layer)
    found.append([config()["grid"][0], config()["ids"], argument().join_ns, layer.num_ctas()])
    layer.plan.workspace["members"].view(layer.window.workspace(layer.plan))[0] = 7 << 8 | 54
    found.append(layer.num_ctas())
    x, ids, scores = torch.zeros(5, 272).bfloat16(), torch.zeros(5, 3, dtype=torch.int64), torch.zeros(5, 3)
    y, state = layer.forward_train(x, ids, scores, weights)
    found.append([config()["ids"], argument().join_ns])
    masters = ExpertWeights(weights.w13.bfloat16(), weights.w2.bfloat16())
    layer.backward(x, x, ids, masters, state, [True] * 4 + [False] * 2)
    found.append([config()["ids"], argument().join_ns])
print(json.dumps(found))
""")
    cooperative, grid, join_ns = ([], 132, JOIN_NS) if reserve_sms is None else ([2], 112, 0)
    first, taken, train, backward = seen
    assert first[:3] == [grid, cooperative, join_ns]
    assert taken == (108 if join_ns else grid)
    assert train == backward == [cooperative, join_ns]
