"""A rank that raises an error instead of a launch ends the launches of the others: the host's side of that."""

from dataclasses import replace
from unittest import mock

import driver_stub
import pytest
from driver_stub import backend_of, tensors
from outcomes import outcome

import megamoe.layer.layer
from megamoe.backends.mega.launches import Forward
from megamoe.jit import abi
from megamoe.layer.layer import Layer

pytestmark = pytest.mark.stub
PROBLEM = replace(driver_stub.PROBLEM, precision="bf16", ep_size=2)


def on_ranks(body, monkeypatch):
    """Return what body(rank, layer, call) returned on each of two ranks, which are threads."""
    monkeypatch.setattr(
        megamoe.layer.layer, "open_backend", lambda o: backend_of(o.problem, group=o.group)
    )

    def run(member):
        problem = replace(PROBLEM, rank=member.rank)
        call = *tensors(), driver_stub.weights_of(problem)
        return body(member.rank, Layer(problem, member), call)

    return driver_stub.on_ranks(run)


def cells(layer):
    window = layer._runtime.backend.window
    return window.regions["window_abort"].view(window.memory).tolist()


CASES = {
    "dtype": ("ArgumentError", "topk_ids.dtype is torch.float32"),
    "shape": ("ArgumentError", "topk_weights.shape is [2, 3]"),
    "freed": ("ArgumentError", "x.untyped_storage() is of 0 bytes"),
    "backward": ("RuntimeError", "one of the variables needed for gradient computation has been"),
    "planted": ("ValueError", "planted"),
}


def some_fail(rank, layer, good):
    """Rank 1 fails in each case, then on both: a call, check(), reset(), a call."""
    (x, ids, scores, weights), leaf = good, good[0].clone().requires_grad_()
    freed = x.clone()
    freed.untyped_storage().resize_(0)

    def trained(change):
        rows = leaf * 1
        y = layer(rows, *good[1:])
        layer.ranks.barrier()
        if change:
            rows.add_(1)
        y.float().sum().backward()

    def planted():
        with mock.patch.object(
            layer._runtime.backend, "forward", side_effect=ValueError("planted")
        ):
            layer(*good)

    wrong = {
        "dtype": lambda: layer(x, ids.float(), scores, weights),
        "shape": lambda: layer(x, ids, scores[:2], weights),
        "freed": lambda: layer(freed, *good[1:]),
        "backward": lambda: trained(True),
        "planted": planted,
    }
    layer(*good)
    trained(False)
    window, found = layer._runtime.backend.window, {}
    for name, call in wrong.items():
        layer.ranks.barrier()
        right = (lambda: trained(False)) if name == "backward" else (lambda: layer(*good))
        told = outcome(call if rank else right)
        layer.ranks.barrier()
        if rank == 0:  # the record of the kernel's last CTA
            window.fault.edge = abi.Edge.peer_abort
        at, then = cells(layer), [outcome(lambda: layer(*good)), outcome(layer.check)]
        layer.ranks.barrier()
        layer.reset()
        found[name] = told, at, then, cells(layer), outcome(lambda: layer(*good))
    layer.close()
    return found


def test_an_error_reaches_the_window_of_the_others(monkeypatch):
    there, here = on_ranks(some_fail, monkeypatch)
    for name, (kind, text) in CASES.items():
        (told, at, (then, check), *after), (own, mine, (broken, _), *also) = there[name], here[name]
        assert own[0] == kind
        assert own[1].startswith(text)
        assert told == (None, "")  # the launch was made
        assert (at, mine) == ([1, 2], [0, 0])  # 1 + the rank
        assert then[0] == "PeerFault"
        assert then[1].startswith("rank 1 raised an error before its launch, so rank 0 left")
        assert check[0] == broken[0] == "WindowBroken"
        assert f"The fault was: rank 1 raised {kind}: {text}" in broken[1]
        assert after == also == [[0, 0], (None, "")]


def test_nobody_is_told_of_an_error_behind_the_launch(monkeypatch):
    launch, calls = Forward.__call__, [0, 0]

    def late(self, call):
        y = launch(self, call)
        calls[self.problem.rank] += 1
        if self.problem.rank == 1 and calls[1] == 2:
            raise ValueError("planted")
        return y

    def body(rank, layer, good):
        found = [outcome(lambda: layer(*good)) for _ in range(3)]
        layer.ranks.barrier()
        return found, cells(layer)

    monkeypatch.setattr(Forward, "__call__", late)
    there, here = on_ranks(body, monkeypatch)
    assert there == ([(None, "")] * 3, [0, 0])
    assert here == ([(None, ""), ("ValueError", "planted"), (None, "")], [0, 0])
