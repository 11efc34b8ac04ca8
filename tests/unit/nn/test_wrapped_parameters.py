"""Parameters that are computed, tied, frozen, swapped or clipped: y and gradients beside a loop over experts."""

import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from outcomes import outcome
from torch import nn
from torch.nn.utils import clip_grad_norm_, parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

from megamoe import MegaMoE, average_expert_gradients
from megamoe.group.group import Group
from megamoe.testing import assert_close, launch

HIDDEN, WIDTH, EXPERTS, TOP_K, TOKENS = 64, 48, 4, 2, 10
BACKENDS = ("staged", "emulate")
# Beside fp64 of the same numbers: y, then gradients. FP8 quantizes x, h and weights.
WITHIN = {"bf16": (0.01, 0.02), "fp8": (0.1, 0.2)}
every = pytest.mark.parametrize("backend", BACKENDS)
both = pytest.mark.parametrize("precision", WITHIN)


class LowRank(nn.Module):
    """w + a @ b, as LoRA adds to a parameter that is frozen."""

    def __init__(self, w, seed):
        super().__init__()
        torch.manual_seed(seed)
        num, rows, columns = w.shape
        self.a = nn.Parameter((0.1 * torch.randn(num, rows, 4)).bfloat16())
        self.b = nn.Parameter((0.5 * torch.randn(num, 4, columns)).bfloat16())

    def forward(self, w):
        return w + self.a @ self.b


def made(backend="staged", group=None, **options):
    sizes = HIDDEN, WIDTH, EXPERTS, TOP_K, group
    return MegaMoE(*sizes, backend=backend, init_seed=1, max_tokens=32, **options)


def drawn(seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16().requires_grad_()
    scores, ids = torch.rand(TOKENS, EXPERTS, generator=generator).topk(TOP_K)
    return x, ids, scores.requires_grad_()


def reference(x, ids, scores, w13, w2):
    y = torch.zeros(x.shape, dtype=torch.float64)
    for e in range(EXPERTS):
        gate, up = (x.double() @ w13[e].double().T).chunk(2, -1)
        of_e = ((ids == e) * scores.double()).sum(-1, keepdim=True)
        y = y + of_e * ((F.silu(gate) * up) @ w2[e].double().T)
    return y


def loss_of(y):
    return y.double().square().sum()


def compare(y, leaves, call, weights, precision):
    """Compare y and the gradients that `leaves` have with those of `weights()`, computed from the same leaves."""
    found = [leaf.grad for leaf in leaves]
    expected = reference(*call, *weights())
    gradients = torch.autograd.grad(loss_of(expected), leaves)
    of_y, of_gradients = WITHIN[precision]
    assert_close(y, expected, relative=of_y, name="y")
    for i, (mine, theirs) in enumerate(zip(found, gradients, strict=True)):
        assert_close(mine, theirs, relative=of_gradients, name=f"gradient {i}")


def with_low_rank(layer):
    """Freeze the experts' matrices and add to them; return what is trained."""
    layer.requires_grad_(False)
    for i, name in enumerate(("w13", "w2")):
        parametrize.register_parametrization(layer, name, LowRank(getattr(layer, name), i))
    return [p for p in layer.parameters() if p.requires_grad]


WAYS = {
    "plain": lambda layer: layer,
    "compiled": lambda layer: torch.compile(layer, backend="aot_eager"),
    "checkpointed": lambda layer: lambda *call: checkpoint(layer, *call, use_reentrant=False),
    "reentrant": lambda layer: lambda *call: checkpoint(layer, *call, use_reentrant=True),
}


ON = [(precision, backend) for precision in WITHIN for backend in BACKENDS]
# A compiled layer is one operator, whatever its backend and precision; checkpoints know no precision.
ON_OF = {"plain": ON, "compiled": ON[-1:]}
TRAINED = [(way, *on) for way in WAYS for on in ON_OF.get(way, (ON[0], ON[-1]))]


@pytest.mark.parametrize("delay", [False, True, "keep"])
@pytest.mark.parametrize(("way", "precision", "backend"), TRAINED)
def test_low_rank_parts_train(way, precision, backend, delay):
    torch.compiler.reset()
    layer = made(backend, precision=precision, delay_wgrad=delay)
    leaves = with_low_rank(layer)
    layer.prepare()
    step, optimizer = WAYS[way](layer), torch.optim.SGD(leaves, lr=4.0)
    for seed in range(2):
        call = drawn(seed)
        y = step(*call)
        loss_of(y).backward()
        if delay:
            assert all(p.grad is None for p in leaves)
            layer.backward_dw()
        sides = [call[0], call[2], *leaves]
        compare(y, sides, call, lambda: (layer.w13, layer.w2), precision)
        clip_grad_norm_(leaves, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()


@every
@both
def test_low_rank_parts_that_come_for_each_call(precision, backend):
    """As PEFT adds them to a parameter: around a forward pass, and gone before its backward pass."""
    layer = made(backend, precision=precision)
    layer.requires_grad_(False)
    plain = layer.w13.detach().clone()
    part = LowRank(plain, 0)
    leaves = list(part.parameters())
    for seed in range(3):
        call = drawn(seed)
        parametrize.register_parametrization(layer, "w13", part)
        y = layer(*call)
        parametrize.remove_parametrizations(layer, "w13", leave_parametrized=False)
        loss_of(y).backward()
        compare(y, leaves, call, lambda: (part(plain), layer.w2), precision)
        with torch.no_grad():
            y, expected = layer(*call), reference(*call, plain, layer.w2)
            assert_close(y, expected, relative=WITHIN[precision][0])
            for p in leaves:
                p -= 0.1 * p.grad / p.grad.norm()
                p.grad = None


@every
@both
def test_norms_of_weights_and_pruning(precision, backend):
    normed, pruned = (made(backend, precision=precision) for _ in range(2))
    parametrizations.weight_norm(normed, "w13")
    parametrizations.spectral_norm(normed, "w2")
    prune.random_unstructured(pruned, "w13", 0.5)
    for layer in (normed, pruned):
        call = drawn()
        loss_of(layer(*call)).backward()
        torch.optim.SGD(layer.parameters(), lr=1e-3).step()
        assert all(p.grad is not None for p in layer.parameters())
        layer.eval()
        if layer is pruned:
            prune.remove(layer, "w13")  # torch copies no module whose parameter is masked
        for one in (layer, copy.deepcopy(layer)):
            with torch.no_grad():
                y, expected = one(*call), reference(*call, one.w13, one.w2)
            assert_close(y, expected, relative=WITHIN[precision][0])


@every
@both
def test_layers_that_share_parameters(precision, backend):
    first, second = (made(backend, precision=precision) for _ in range(2))
    second.w13, second.w2 = first.w13, first.w2
    model = nn.ModuleList([first, second])
    leaves = list(model.parameters())
    assert len(leaves) == 2
    optimizer = torch.optim.SGD(leaves, lr=1e-3)
    for seed in range(2):
        x, ids, scores = call = drawn(seed)
        y = torch.cat([first(*call), second(-x, ids, scores)])
        loss_of(y).backward()
        twice = torch.cat([x, -x]), ids.repeat(2, 1), scores.repeat(2, 1)
        compare(y, leaves, twice, lambda: leaves, precision)
        optimizer.step()
        optimizer.zero_grad()


@every
@both
@pytest.mark.parametrize("name", ["w13", "w2"])
def test_frozen_between_forward_and_backward(name, precision, backend):
    """The pass has the other gradients; passes behind it leave the frozen one alone, until it is thawed."""
    layer = made(backend, precision=precision)
    frozen, leaves = getattr(layer, name), [layer.w13, layer.w2]
    other = leaves[name == "w13"]
    for seed, wanted in enumerate((True, False, True)):
        call = drawn(seed)
        frozen.requires_grad_(wanted)
        y = layer(*call)
        frozen.requires_grad_(False)
        loss_of(y).backward()
        assert wanted or frozen.grad is None
        sides = [call[0], call[2], other]
        compare(y, sides, call, lambda: leaves, precision)
        layer.zero_grad()


@every
@both
def test_scaled_losses_hooks_and_clipping(precision, backend):
    layer, call = made(backend, precision=precision), drawn()
    leaves = [layer.w13, layer.w2]
    layer.register_full_backward_pre_hook(lambda _, dy: (2 * dy[0],))
    for leaf in leaves:
        leaf.register_post_accumulate_grad_hook(lambda w: setattr(w, "grad", w.grad / 2))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(leaves, lr=1e-3)
    y = layer(*call)
    scaler.scale(loss_of(y)).backward()
    scaler.unscale_(optimizer)
    compare(y, leaves, call, lambda: leaves, precision)
    clip_grad_norm_(leaves, 1.0, foreach=True)
    scaler.step(optimizer)
    scaler.update()
    before = layer.w13.detach().clone()
    optimizer.zero_grad()
    scaler.scale(float("inf") * loss_of(layer(*call))).backward()
    scaler.step(optimizer)  # skipped
    assert torch.equal(layer.w13, before)
    with torch.no_grad():
        y, expected = layer(*call), reference(*call, *leaves)
    assert_close(y, expected, relative=WITHIN[precision][0])


@every
@both
def test_swapped_and_assigned_parameters(precision, backend):
    layer, call = made(backend, precision=precision), drawn()
    layer(*call)

    def check():
        with torch.no_grad():
            y, expected = layer(*call), reference(*call, layer.w13, layer.w2)
            assert_close(y, expected, relative=WITHIN[precision][0])

    vector = nn.utils.parameters_to_vector(layer.parameters()).detach()
    nn.utils.vector_to_parameters(-2 * vector, layer.parameters())
    check()
    torch.utils.swap_tensors(layer.w2, nn.Parameter(-layer.w2.detach()))
    check()
    layer.register_state_dict_post_hook(lambda _, d, prefix, __: d.update(w13=2 * d["w13"]))
    layer.load_state_dict(layer.state_dict(), assign=True)
    check()
    layer.share_memory()
    check()


def come_for_each_call(rank):
    layer = made(group=dist.group.WORLD)
    average_expert_gradients(layer, 2)
    part = LowRank(layer.w13.detach(), 0)
    with mock.patch.object(Group, "agree", autospec=True, side_effect=Group.agree) as asked:
        for seed in range(3):
            parametrize.register_parametrization(layer, "w13", part)
            y = layer(*drawn(seed))
            parametrize.remove_parametrizations(layer, "w13", leave_parametrized=False)
            loss_of(y).backward()
        parametrize.register_parametrization(layer, "w13", part)
        found = outcome(lambda: layer(*drawn()))
        if rank == 0:
            parametrize.remove_parametrizations(layer, "w13", leave_parametrized=False)
        alone = outcome(lambda: layer(*drawn()))
    return asked.call_count, found, alone


def test_parts_that_come_for_each_call_are_no_reason_to_ask_again():
    """Ranks agree where a layer is opened, not at each call."""
    for asked, found, alone in launch(come_for_each_call, 2, timeout_s=60):
        assert asked == 1
        assert found == alone == (None, "")


class Failing(nn.Module):
    """A parametrization that one rank cannot compute."""

    fails = False

    def forward(self, w):
        if Failing.fails:
            raise ValueError("no memory left, say")
        return w


def fail_on_one(rank, backend):
    found = []
    layer = made(backend, dist.group.WORLD)
    parametrize.register_parametrization(layer, "w13", Failing())
    for wrapped in (False, False, True):
        if wrapped:  # another class, as wrappers make it
            layer.__class__ = type("Wrapped", (type(layer),), {})
        for fails in (True, False):
            Failing.fails = fails and rank == 1
            found.append(outcome(lambda: layer(*drawn(rank))))
    layer.close()
    Failing.fails = rank == 1
    found.append(outcome(layer.prepare))
    Failing.fails = False
    found.append(outcome(layer.prepare))
    layer.close()
    return found


@pytest.mark.parametrize("backend", ["staged", "emulate"])
def test_parameters_that_one_rank_cannot_compute_raise_on_all(backend):
    there, here = launch(fail_on_one, 2, backend, timeout_s=60)
    assert there[1::2] == here[1::2] == [(None, "")] * 4
    assert [kind for kind, _ in there[::2]] == ["PeerFault"] * 4, there
    assert here[::2] == [("ValueError", "no memory left, say")] * 4


class Own(nn.Parameter):
    """A class of parameters, which torch may treat in ways of its own."""


def lose_saved_tensors(rank):
    def unpack(tensor):
        if rank == 1:
            raise OSError("no such file")
        return tensor

    found = []
    for kind in (nn.Parameter, Own):
        layer = made("reference", dist.group.WORLD)
        layer.w13 = kind(layer.w13.data)
        x, ids, scores = drawn(rank)
        y = layer(x, ids, scores)
        if rank == 1:
            ids.add_(0)
        found.append(outcome(loss_of(y).backward))
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
            y = layer(x, ids, scores)
        found.append(outcome(loss_of(y).backward))
        found.append(outcome(loss_of(layer(x, ids, scores)).backward))
        layer.close()
    return found


def test_a_backward_pass_whose_tensors_one_rank_has_lost_raises_on_all():
    """Written to, or offloaded and gone."""
    there, here = launch(lose_saved_tensors, 2, timeout_s=60)
    assert [kind for kind, _ in there] == ["PeerFault", "PeerFault", None] * 2, there
    assert [kind for kind, _ in here] == ["RuntimeError", "OSError", None] * 2, here
