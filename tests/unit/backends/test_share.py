"""Which SMs a launch takes beside other kernels: the default, what is stated, and how the launch is made."""

import pytest
import torch
from driver_stub import PROBLEM, argument, config, forward, tensors, weights_of

from megamoe import Layer
from megamoe.backends.call import Call, GradRequest, Needs
from megamoe.backends.mega.backend import MegaBackend
from megamoe.backends.mega.sm_share import JOIN_NS, PEERS_NS, Share, check_shares, share_of
from megamoe.core.errors import RankMismatch
from megamoe.formats.weights import ExpertWeights, TransposedWeights
from megamoe.group.group import Group
from megamoe.window.window import Window


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


class Remote(Group):
    """A rank that may have others in other processes."""

    def __init__(self):
        super().__init__()
        self.in_process = False


def remote(**options):
    return MegaBackend(PROBLEM, Remote(), window=Window(PROBLEM, device="cpu"), **options)


def patience():
    return argument().join_ns, argument().peers_ns


def train(layer):
    """Yield behind the launch of each direction."""
    x, ids, scores = tensors()
    weights = weights_of()
    _, state = layer.forward(Call(x, ids, scores, weights), keep=True)
    yield
    masters = ExpertWeights(weights.w13.bfloat16(), weights.w2.bfloat16())
    wanted = GradRequest(
        Needs(b13=False, b2=False), transposed=TransposedWeights.of(PROBLEM, weights)
    )
    layer.backward(Call(x, ids, scores, masters), x, state, wanted)
    yield


@pytest.mark.stub
@pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "enable_grad"])
def test_a_layer_that_is_first_called_without_gradients_trains_as_others_do(monkeypatch, mode):
    """Its launches that train take what is free; else they could wait for a collective that waits for them."""
    monkeypatch.setattr("megamoe.layer.layer.open_backend", lambda *given: remote())
    layer, (x, ids, scores), weights = Layer(PROBLEM, backend="staged"), tensors(), weights_of()
    waits, all_at_once = ({}, (JOIN_NS, PEERS_NS)), ({2: 1}, (0, 0))
    with getattr(torch, mode)():
        x.requires_grad_(torch.is_grad_enabled())
        layer(x, ids, scores, weights)
    assert (config()["attributes"], patience()) == (waits if mode == "enable_grad" else all_at_once)
    layer(x.detach().clone().requires_grad_(), ids, scores, weights)
    assert (config()["attributes"], patience()) == waits


def note_members(layer):
    layer.plan.workspace["members"].view(layer.window.workspace(layer.plan))[0] = 7 << 8 | 54


@pytest.mark.stub
def test_a_layer_made_without_gradients_says_how_many_ctas_trained():
    """Of its forwards, which do not share, all; of `train` and `backward` those that the launch has written."""
    with torch.no_grad():
        layer = remote()
        forward(layer, *tensors(), weights_of())
    note_members(layer)
    assert layer.num_ctas() == 132
    for _ in train(layer):
        assert layer.num_ctas() == 108
    forward(layer, *tensors(), weights_of())
    assert layer.num_ctas() == 132


@pytest.mark.stub
@pytest.mark.parametrize("reserve_sms", [None, 20])
def test_only_a_launch_with_all_of_its_ctas_is_cooperative(reserve_sms):
    waits = (JOIN_NS, PEERS_NS) if reserve_sms is None else (0, 0)
    cooperative, grid = ({}, 132) if reserve_sms is None else ({2: 1}, 112)
    layer = remote(reserve_sms=reserve_sms)
    forward(layer, *tensors(), weights_of())
    assert (config()["grid"][0], config()["attributes"], patience()) == (grid, cooperative, waits)
    note_members(layer)
    assert layer.num_ctas() == (108 if waits[0] else grid)
    for _ in train(layer):
        assert (config()["attributes"], patience()) == (cooperative, waits)
