"""Which SMs a launch takes beside other kernels: the default, what is stated, and how the launch is made."""

import pytest
import torch

from megamoe.backends.mega.sm_share import JOIN_NS, PEERS_NS, Share, check_shares, share_of
from megamoe.core.errors import RankMismatch
from megamoe.group.group import Group


class Ranks(Group):
    def __init__(self):
        super().__init__()
        self.in_process, self.size = False, 2


def test_a_launch_that_trains_beside_others_takes_what_is_free(monkeypatch):
    monkeypatch.delenv("MEGAMOE_RESERVE_SMS", raising=False)
    assert share_of(Ranks(), None) == Share(0, JOIN_NS, PEERS_NS)
    assert share_of(Group(), None) == Share(0, 0, 0)  # it waits for no other rank
    with torch.no_grad():
        assert share_of(Ranks(), None) == Share(0, 0, 0)
        assert share_of(Ranks(), None, trains=True) == Share(0, JOIN_NS, PEERS_NS)


def test_a_number_is_kept_and_then_a_launch_has_all_of_its_ctas(monkeypatch):
    monkeypatch.setenv("MEGAMOE_RESERVE_SMS", "12")
    assert share_of(Ranks(), None) == Share(12, 0, 0)
    assert share_of(Ranks(), 0) == Share(0, 0, 0)
    monkeypatch.setenv("MEGAMOE_RESERVE_SMS", "0")  # stated, unlike an empty one
    assert share_of(Ranks(), None) == Share(0, 0, 0)


def test_ranks_of_which_some_share_are_refused(monkeypatch):
    """On all ranks, since each knows what all stated: test_exchanges.py has a run of two."""
    monkeypatch.delenv("MEGAMOE_RESERVE_SMS", raising=False)
    shares = [share_of(Ranks(), stated) for stated in (8, None)]
    for pair, free in ((shares, 1), (shares[::-1], 0)):
        with pytest.raises(RankMismatch, match=f"rank {free} take the SMs that are free"):
            check_shares(pair)
    check_shares([share_of(Ranks(), stated) for stated in (8, 16)])


# Of a program: a rank that may have others in other processes.
REMOTE = """
from megamoe.group.group import Group
class Ranks(Group):
    def __init__(self):
        super().__init__()
        self.in_process = False
"""


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "enable_grad"])
def test_a_layer_that_is_first_called_without_gradients_trains_as_others_do(run, mode):
    """Its launches that train take what is free; else they could wait for a collective that waits for them."""
    seen = run(f"""
import megamoe
from unittest import mock
{REMOTE}def patience():
    return config()["ids"], argument().join_ns, argument().peers_ns
def opened(*given):
    return mega.MegaBackend(problem, Ranks(), window=Window(problem, device="cpu"))
with on_cpu(), mock.patch("megamoe.layer.layer.open_backend", opened):
    layer = megamoe.Layer(problem, backend="staged")
    x, ids, scores = torch.zeros(5, 272).bfloat16(), torch.zeros(5, 3, dtype=torch.int64), torch.zeros(5, 3)
    with torch.{mode}():
        x.requires_grad_(torch.is_grad_enabled())
        y = layer(x, ids, scores, weights)
    found = [patience()]
    layer(x.detach().clone().requires_grad_(), ids, scores, weights)
    found.append(patience())
print(json.dumps(found))
""")
    waits, all_at_once = [[], JOIN_NS, PEERS_NS], [[2], 0, 0]
    assert seen == [waits if mode == "enable_grad" else all_at_once, waits]


def test_a_layer_made_without_gradients_says_how_many_ctas_trained(run):
    """Of its forwards, which do not share, all; of `train` and `backward` those that the launch has written."""
    plain, train, backward, again = run(f"""
{REMOTE}x, ids, scores = torch.zeros(5, 272).bfloat16(), torch.zeros(5, 3, dtype=torch.int64), torch.zeros(5, 3)
with on_cpu():
    with torch.no_grad():
        layer = mega.MegaBackend(problem, Ranks(), window=Window(problem, device="cpu"))
        call(layer)
    layer.plan.workspace["members"].view(layer.window.workspace(layer.plan))[0] = 7 << 8 | 54
    found = [layer.num_ctas()]
    y, state = layer.forward(Call(x, ids, scores, weights), keep=True)
    found.append(layer.num_ctas())
    masters = ExpertWeights(weights.w13.bfloat16(), weights.w2.bfloat16())
    wanted = Wanted(Needs(b13=False, b2=False), turned=TurnedWeights.of(problem, weights))
    layer.backward(Call(x, ids, scores, masters), x, state, wanted)
    found.append(layer.num_ctas())
    call(layer)
    found.append(layer.num_ctas())
print(json.dumps(found))
""")
    assert (plain, train, backward, again) == (132, 108, 108, 132)


@pytest.mark.parametrize("reserve_sms", [None, 20])
def test_only_a_launch_with_all_of_its_ctas_is_cooperative(run, reserve_sms):
    seen = run(f"""
{REMOTE}def patience():
    return argument().join_ns, argument().peers_ns
with on_cpu():
    found, share = [], {reserve_sms!r}
    layer = mega.MegaBackend(problem, Ranks(), window=Window(problem, device="cpu"), reserve_sms=share)
    call(layer)
    found.append([config()["grid"][0], config()["ids"], *patience(), layer.num_ctas()])
    layer.plan.workspace["members"].view(layer.window.workspace(layer.plan))[0] = 7 << 8 | 54
    found.append(layer.num_ctas())
    x, ids, scores = torch.zeros(5, 272).bfloat16(), torch.zeros(5, 3, dtype=torch.int64), torch.zeros(5, 3)
    y, state = layer.forward(Call(x, ids, scores, weights), keep=True)
    found.append([config()["ids"], *patience()])
    masters = ExpertWeights(weights.w13.bfloat16(), weights.w2.bfloat16())
    turned = TurnedWeights.of(problem, weights)
    wanted = Wanted(Needs(b13=False, b2=False), turned=turned)
    layer.backward(Call(x, ids, scores, masters), x, state, wanted)
    found.append([config()["ids"], *patience()])
print(json.dumps(found))
""")
    waits = [JOIN_NS, PEERS_NS] if reserve_sms is None else [0, 0]
    cooperative, grid = ([], 132) if reserve_sms is None else ([2], 112)
    first, taken, train, backward = seen
    assert first[:4] == [grid, cooperative, *waits]
    assert taken == (108 if waits[0] else grid)
    assert train == backward == [cooperative, *waits]
