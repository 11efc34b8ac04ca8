"""What adapters do alike, without a library: what is refused, modules with a layer, windows of one size, patches."""

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from pages import programs

from megamoe import Layer
from megamoe.adapters import library_layer
from megamoe.adapters.library_layer import check, close_in
from megamoe.adapters.library_patches import Patches, found
from megamoe.core.config import Problem
from megamoe.core.errors import ConfigError
from megamoe.testing import make_inputs, make_weights, same_bits

PROBLEM = Problem(64, 48, 6, 2, max_tokens=64)


(PROGRAM,) = programs("docs/adapters.md", "library")
exec(PROGRAM, NAMES := {})


class Experts(NAMES["MegaExperts"]):
    """The document's, which count the layers that they open."""

    opened = 0

    def _open(self, device):
        self.opened += 1
        return super()._open(device)


def test_a_module_opens_its_layer_at_a_first_call_and_again_after_close():
    i, weights = make_inputs(PROBLEM, 5), make_weights(PROBLEM)
    call = i.x, i.topk_ids, i.topk_weights
    experts = Experts(weights.w13, weights.w2, PROBLEM.top_k, backend="staged")
    y = experts(*call)
    assert same_bits(y, Layer(PROBLEM, backend="staged")(*call, weights))
    y.backward(torch.ones_like(y))
    assert experts.gate_up.grad.any()
    assert experts.down.grad.any()
    assert same_bits(experts(*call), y)
    assert experts.opened == 1
    other = copy.deepcopy(experts)
    assert other._layer is None
    assert same_bits(other(*call), y)
    assert other.opened == 2
    close_in(torch.nn.Sequential(experts, other))
    assert experts._layer is other._layer is None
    assert same_bits(experts(*call), y)
    assert experts.opened == 2
    experts.close()


def test_what_no_layer_could_have_is_refused():
    check("staged", {"reserve_sms": 4}, PROBLEM, trains=True)
    with pytest.raises(ConfigError, match="backend is 'magma'"):
        check("magma", {})
    with pytest.raises(ConfigError, match="option is 'reserve_sm'"):
        check("auto", {"reserve_sm": 4})
    check("auto", {}, Problem(128, 128, 2048, 2, ep_size=2))  # more than one rank can hold
    packed = replace(PROBLEM, intermediate=64, precision="bf16xmxfp4")
    check("auto", {})
    with pytest.raises(ConfigError, match="precision is 'bf16xmxfp4', expected 'bf16' or 'fp8'"):
        check("auto", {}, packed, trains=True)


def test_no_window_is_taken_for_a_layer_that_is_refused(monkeypatch):
    monkeypatch.setattr(library_layer, "borrow_window", lambda *_: pytest.fail("taken"))
    with pytest.raises(ConfigError, match="apply_router_weight_on_input"):
        library_layer.LibraryLayer(
            *(PROBLEM, None, torch.device("cpu"), "staged", {}), apply_router_weight_on_input=True
        )


def test_layers_of_one_size_share_a_window_until_the_last_is_closed(monkeypatch):
    made, closed = [], []
    chosen = ["mega"]

    def window_of(opening):
        return (opening.problem, opening.group) if chosen[-1] == "mega" else None

    monkeypatch.setattr(library_layer, "window_of", window_of)
    window = type("Window", (), {"close": lambda self: closed.append(self)})
    monkeypatch.setattr(library_layer, "Window", lambda *_, **__: made.append(window()) or made[-1])
    small, cuda = Problem(64, 48, 6, 2, max_tokens=64), torch.device("cuda", 0)
    problems = [small, replace(small, num_experts=8), replace(small, top_k=3)]
    taken = [library_layer.borrow_window(p, None, cuda, "auto", {}) for p in problems]
    assert [made.index(t["window"]) for t in taken] == [0, 0, 1]
    library_layer.return_window(taken[0])
    assert not closed
    library_layer.return_window(taken[1])
    assert closed == made[:1]
    assert library_layer.borrow_window(small, None, cuda, "auto", {"window": made[1]}) == {}
    chosen.append("staged")
    assert library_layer.borrow_window(small, None, cuda, "auto", {}) == {}
    library_layer.return_window({})
    library_layer.return_window(taken[2])
    assert closed == made
    assert not library_layer._windows


def test_patches_are_put_once_and_undone():
    library, made, patches = SimpleNamespace(__name__="library", old=1), object(), Patches()
    assert found("library 1.0", library, "old") == 1
    with pytest.raises(ConfigError, match="library.new is missing, expected library 1.0"):
        found("library 1.0", library, "new")
    for _ in range(2):
        patches.check_none()
        patches.put(made, [(library, "old", 2), (library, "new", 3), (library, "old", 4)])
        assert (library.old, library.new, patches.made) == (4, 3, made)
        with pytest.raises(ConfigError, match="called again, expected one call, or uninstall"):
            patches.check_none()
        patches.undo()
        assert (vars(library), patches.made) == ({"__name__": "library", "old": 1}, None)
