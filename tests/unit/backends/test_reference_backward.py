"""The oracle of the backward pass against fp64 autograd of the definition, and planted faults."""

import importlib
import itertools
from dataclasses import dataclass, replace

import pytest
import torch
from formulas import activate

from megamoe.backends import reference
from megamoe.core.config import ACTIVATIONS, Problem
from megamoe.formats.quantization import dequantize_rows, quantize_rows
from megamoe.formats.weights import ExpertWeights
from megamoe.testing import assert_close, compare, make_inputs, make_weights

oracle = importlib.import_module("megamoe.backends.reference.backward")
prologue = importlib.import_module("megamoe.backends.reference.layer")
NAMES = ("dx", "d_topk_weights", "dw13", "dw2", "db13", "db2")
LIMIT = ACTIVATIONS["swiglu_oai"].limit


@dataclass
class Call:
    """One call of all ranks, in fp64."""

    problem: Problem
    x: list
    ids: list
    scores: list
    weights: list
    dy: list

    def leaves(self):
        """Yield x, topk_weights of each rank, then w13, w2, b13, b2 of each rank."""
        yield from itertools.chain.from_iterable(zip(self.x, self.scores, strict=True))
        for experts in self.weights:
            yield from experts.named().values()

    def with_leaves(self, leaves):
        leaves = list(leaves)
        ranks, rest = self.problem.ep_size, 4 if self.problem.bias else 2
        weights = leaves[2 * ranks :]
        experts = [ExpertWeights(*weights[r * rest : (r + 1) * rest]) for r in range(ranks)]
        return replace(
            self, x=leaves[: 2 * ranks : 2], scores=leaves[1 : 2 * ranks : 2], weights=experts
        )

    def forward(self):
        """Token by token."""
        problem, result = self.problem, []
        for x, ids, scores in zip(self.x, self.ids, self.scores, strict=True):
            y = []
            for t in range(x.shape[0]):
                y_t = x[t] * 0
                for k, e in enumerate(ids[t].tolist()):
                    if not 0 <= e < problem.num_experts:
                        continue
                    owner = problem.rank_of_expert(e)
                    w, local = self.weights[owner], e - problem.expert_begin(owner)
                    gate_up = w.w13[local] @ x[t] + (w.b13[local] if problem.bias else 0)
                    h = activate(problem.activation, gate_up)
                    y_t = y_t + scores[t, k] * (
                        w.w2[local] @ h + (w.b2[local] if problem.bias else 0)
                    )
                y.append(y_t)
            result.append(torch.stack(y) if y else x * 0)
        return result

    def expected(self):
        """Return the gradients by autograd, in the order of leaves()."""
        leaves = [leaf.detach().clone().requires_grad_() for leaf in self.leaves()]
        y = torch.cat(self.with_leaves(leaves).forward())
        return torch.autograd.grad(y, leaves, torch.cat(self.dy), materialize_grads=True)

    def found(self, **options):
        """Return the oracle's, likewise."""
        call = self.problem, self.dy, self.x, self.ids, self.scores, self.weights
        out = reference.backward(*call, **{"rounding": "none", **options})
        yield from itertools.chain.from_iterable(zip(out["dx"], out["d_topk_weights"], strict=True))
        for rank in range(self.problem.ep_size):
            yield from (out[n][rank] for n in NAMES[2:] if out[n][rank] is not None)

    def check(self):
        for found, expected in zip(self.found(), self.expected(), strict=True):
            assert found.dtype == torch.float64
            assert_close(found, expected, relative=1e-12)


def make_call(activation, bias, tokens=(6, 3), num_experts=5):
    """Random numbers; token 0 of rank 0 has x = (1, 0, ..) and goes to both ranks."""
    ranks = len(tokens)
    problem = Problem(
        16, 16, num_experts, 2, ep_size=ranks, max_tokens=64, activation=activation, bias=bias
    )
    generator = torch.Generator().manual_seed(1)

    def draw(*shape, scale=1.0):
        return scale * torch.randn(shape, generator=generator, dtype=torch.float64)

    weights = []
    for rank in range(ranks):
        num, rows = problem.num_local_experts(rank), problem.activation.planes * 16
        w = draw(num, rows, 16, scale=0.5), draw(num, 16, 16, scale=0.5)
        # Biases are multiples of 1/8, so that sums with a limit are exact.
        biases = ((draw(num, rows) * 8).round() / 8, draw(num, 16)) if bias else ()
        weights.append(ExpertWeights(*w, *biases))
    x, dy = ([draw(t, 16) for t in tokens] for _ in range(2))
    x[0][0] = torch.eye(16, dtype=torch.float64)[0]
    ids = [torch.rand(t, num_experts, generator=generator).topk(2).indices for t in tokens]
    ids[0][0] = torch.tensor([0, num_experts - 1])
    scores = [draw(t, 2).abs() for t in tokens]
    return Call(problem, x, ids, scores, weights, dy)


def set_pre_activations(call, plane, values):
    """Give the last len(values) columns of a plane these pre-activations in token 0, exactly."""
    for experts in call.weights:
        columns = slice((plane + 1) * 16 - len(values), (plane + 1) * 16)
        value = torch.tensor(values, dtype=torch.float64)
        bias = experts.b13[:, columns] if call.problem.bias else 0
        experts.w13[:, columns, 0] = value - bias


def gate_at_limit(call):
    set_pre_activations(call, 0, [LIMIT, LIMIT + 0.125, LIMIT - 0.125, -LIMIT])


def up_at_limit(call):
    set_pre_activations(call, call.problem.activation.planes - 1, [LIMIT, -LIMIT, 7.125, -7.125])


def up_zero(call):
    for plane in range(call.problem.activation.planes):
        set_pre_activations(call, plane, [0.0, -0.0])


def dropped(call):
    call.ids[0][1, 0], call.ids[0][2, 1] = -1, call.problem.num_experts
    call.scores[0][1, 0] = call.scores[0][2, 1] = float("nan")


def repeated(call):
    call.ids[0][3] = call.ids[0][3, 0]


def zero_weight(call):
    call.scores[0][:2] = 0


def empty_rank(call):
    """Rank 1 has neither tokens nor rows."""
    call.ids[0] %= call.problem.expert_begin(1)
    call.x[1], call.dy[1], call.ids[1], call.scores[1] = (
        t[:0] for t in (call.x[1], call.dy[1], call.ids[1], call.scores[1])
    )


def empty_expert(call):
    for ids in call.ids:
        ids[ids == 1] = 2


def no_routes(call):
    call.ids[0][4] = torch.tensor([-1, call.problem.num_experts + 3])


def nothing(call):
    for ids in call.ids:
        ids.fill_(-1)


EDGES = (
    *(gate_at_limit, up_at_limit, up_zero, dropped, repeated, zero_weight),
    *(empty_rank, empty_expert, no_routes, nothing),
)


def edge_call(edge, activation="swiglu_oai", bias=True):
    call = make_call(activation, bias)
    edge(call)
    return call


@pytest.mark.parametrize("edge", EDGES, ids=lambda edge: edge.__name__)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_equals_autograd(activation, edge):
    for bias in (False, True):
        edge_call(edge, activation, bias).check()


# Planted faults: each replaces a part of the oracle.
right_gradient, right_route = oracle.activation_gradient, prologue.route
right_outer, right_reduce = oracle.grouped_outer, oracle.reduce


def scale_twice(monkeypatch):
    def weights_squared(rows, operands, experts, dtype):
        x_rows, dy_rows, s, dgu, hs = operands
        return right(rows, (x_rows, dy_rows, s, s * dgu, s * hs), experts, dtype)

    right = oracle.expert_gradients
    monkeypatch.setattr(oracle, "expert_gradients", weights_squared)


def swap_planes(monkeypatch):
    def swapped(activation, gate_up, dh):
        d, h = right_gradient(activation, gate_up, dh)
        return d.roll(d.shape[-1] // 2, dims=-1), h

    monkeypatch.setattr(oracle, "activation_gradient", swapped)


def closed_at_limit(monkeypatch, plane):
    """The clamp passes nothing at equality."""

    def closed(activation, gate_up, dh):
        d, h = right_gradient(activation, gate_up, dh)
        open_ = torch.ones_like(d)
        open_.chunk(2, -1)[plane][gate_up.chunk(2, -1)[plane].abs() == LIMIT] = 0
        return d * open_, h

    monkeypatch.setattr(oracle, "activation_gradient", closed)


def slope_by_division(monkeypatch):
    """h / u in place of h's derivative by u."""

    def divided(activation, gate_up, dh):
        d, h = right_gradient(activation, gate_up, dh)
        gate, up = gate_up.chunk(2, -1)
        return torch.cat((d.chunk(2, -1)[0], dh * h / up), -1), h

    monkeypatch.setattr(oracle, "activation_gradient", divided)


def clip_ids(monkeypatch):
    """Dropped routes go to an expert after all."""

    def clipped(problem, rank, ids):
        return right_route(problem, rank, [t.clamp(0, problem.num_experts - 1) for t in ids])

    monkeypatch.setattr(prologue, "route", clipped)


def lose_rows(monkeypatch, lost):
    """lost: what says which rows are missing in dx."""

    def losing(rows, dx_rows, ones, dtype):
        return right_reduce(rows, dx_rows * ~lost(rows)[:, None], ones, dtype)

    monkeypatch.setattr(oracle, "reduce", losing)


def same_expert_twice(rows):
    pair = rows.token * 1000 + rows.expert
    return torch.tensor([bool((pair[:m] == pair[m]).any()) for m in range(pair.numel())])


def shift_experts(monkeypatch):
    """dW of the neighbour."""
    monkeypatch.setattr(oracle, "grouped_outer", lambda *a: right_outer(*a).roll(1, dims=0))


def compact_experts(monkeypatch):
    """Experts without rows are not counted."""

    def compact(left, right, expert, num):
        return right_outer(left, right, torch.unique(expert, return_inverse=True)[1], num)

    monkeypatch.setattr(oracle, "grouped_outer", compact)


def keep_memory(monkeypatch):
    """Gradients of experts without rows are what was there."""

    def kept(left, right, expert, num):
        out = right_outer(left, right, expert, num)
        out[torch.bincount(expert, minlength=num) == 0] = 7
        return out

    monkeypatch.setattr(oracle, "grouped_outer", kept)


def keep_tokens(monkeypatch):
    """dx of tokens without rows likewise."""
    right = oracle.combine

    def kept(partials, dtype):
        dx = right(partials, dtype)
        dx[~dx.any(1)] = 7
        return dx

    monkeypatch.setattr(oracle, "combine", kept)


def skip_weightless(monkeypatch):
    """Rows of the tokens whose weights zero_weight makes 0 are left out: d_s is not 0 for that."""

    def skipped(problem, rank, ids):
        return right_route(
            problem, rank, [ids[0].index_fill(0, torch.tensor([0, 1]), -1), *ids[1:]]
        )

    monkeypatch.setattr(prologue, "route", skipped)


FAULTS = {
    "scale_twice": (repeated, scale_twice),
    "swap_planes": (up_zero, swap_planes),
    "gate_closed": (gate_at_limit, lambda m: closed_at_limit(m, 0)),
    "up_closed": (up_at_limit, lambda m: closed_at_limit(m, 1)),
    "slope_by_division": (up_zero, slope_by_division),
    "clip_ids": (dropped, clip_ids),
    "clip_ids_of_a_token": (no_routes, clip_ids),
    "repeated_row_missing": (repeated, lambda m: lose_rows(m, same_expert_twice)),
    "row_missing": (dropped, lambda m: lose_rows(m, lambda rows: rows.pool_row == 0)),
    "skip_weightless": (zero_weight, skip_weightless),
    "shift_experts": (repeated, shift_experts),
    "compact_experts": (empty_expert, compact_experts),
    "keep_memory": (empty_expert, keep_memory),
    "keep_memory_of_a_rank": (empty_rank, keep_memory),
    "keep_memory_of_all": (nothing, keep_memory),
    "keep_tokens": (no_routes, keep_tokens),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_seen(name, monkeypatch):
    edge, plant = FAULTS[name]
    call = edge_call(edge)
    call.check()
    plant(monkeypatch)
    with pytest.raises(AssertionError, match="relative"):
        call.check()


# Rounding, and the options, on the inputs that the backends get.
def setup(problem, tokens=(70, 33), routing="uniform"):
    """Return dy, x, topk_ids, topk_weights and masters of all ranks."""
    ranks = range(problem.ep_size)
    inputs = [make_inputs(problem, tokens[r], rank=r, routing=routing) for r in ranks]
    dy = [make_inputs(problem, tokens[r], rank=r, seed=7).x for r in ranks]
    weights = [make_weights(problem, rank=r, quantize=False) for r in ranks]
    return (
        dy,
        *([getattr(i, n) for i in inputs] for n in ("x", "topk_ids", "topk_weights")),
        weights,
    )


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_equals_autograd_of_the_forward_oracle(activation):
    problem = Problem(32, 48, 5, 3, ep_size=2, activation=activation, bias=True)
    dy, x, ids, scores, weights = setup(problem, routing="dropped")
    leaves = [[t.float().requires_grad_() for t in ts] for ts in (x, scores)]
    experts = [
        ExpertWeights(**{n: t.float().requires_grad_() for n, t in w.named().items()})
        for w in weights
    ]
    out = reference.forward(problem, leaves[0], ids, leaves[1], experts, rounding="none")
    flat = [*leaves[0], *leaves[1], *(t for w in experts for t in w.named().values())]
    expected = torch.autograd.grad(out["y"], flat, [t.float() for t in dy])
    found = reference.backward(problem, dy, x, ids, scores, weights, rounding="none")
    names = [name for name in NAMES[:2] for _ in range(2)]
    of_ranks = [(found[n][r], n) for r in range(2) for n in NAMES[2:]]
    pairs = [*zip(found["dx"] + found["d_topk_weights"], names, strict=True), *of_ranks]
    for (gradient, name), right in zip(pairs, expected, strict=True):
        assert_close(gradient, right, relative=2e-6, name=name)
    for rank in range(2):
        assert_close(found["gate_up"][rank], out["gate_up"][rank], relative=1e-6)
        assert_close(found["h"][rank], out["h"][rank], relative=2e-6)


def test_what_is_rounded():
    problem = Problem(144, 80, 4, 2, ep_size=2, activation="geglu", bias=True)
    call = setup(problem)
    kernel, exact = (reference.backward(problem, *call, rounding=r) for r in ("kernel", "none"))
    for rank in range(2):
        rows = kernel["rows"][rank].token.numel()
        shapes = {
            "dy_rows": (rows, 144),
            "x_rows": (rows, 144),
            "row_weight": (rows,),
            "gate_up": (rows, 160),
            "dh": (rows, 80),
            "h": (rows, 80),
            "d_s": (rows,),
            "dgu": (rows, 160),
            "hs": (rows, 80),
            "dx_rows": (rows, 144),
            "partials": (103, 144),
            "dx": ((70, 33)[rank], 144),
            "d_topk_weights": ((70, 33)[rank], 2),
            "dw13": (2, 160, 144),
            "dw2": (2, 144, 80),
            "db13": (2, 160),
            "db2": (2, 144),
        }
        assert {name: tuple(kernel[name][rank].shape) for name in shapes} == shapes
        in_fp32 = {"row_weight", "dh", "h", "d_s", "d_topk_weights", "db13", "db2"}
        for name in shapes:
            assert kernel[name][rank].dtype == (
                torch.float32 if name in in_fp32 else torch.bfloat16
            )
            error = compare(kernel[name][rank], exact[name][rank]).relative
            # One bf16 rounding is 1.7e-3, and no result has more than a few behind it.
            assert error < 5e-3, name
            assert (error > 0) == (name not in ("dy_rows", "x_rows", "row_weight", "dh", "db2"))
    assert reference.backward(problem, *call, dw_dtype=torch.float32)["dw13"][1].dtype == (
        torch.float32
    )


def test_given_pre_activations_decide_about_the_clamp():
    """7.01 is clamped in forward; rounded to bf16 it is 7, which passes the gradient."""
    problem = Problem(16, 16, 1, 1, activation="swiglu_oai")
    call = make_call("swiglu_oai", False, tokens=(1,), num_experts=2)
    dy, x, scores, weights = call.dy, call.x, [call.scores[0][:, :1]], call.weights
    ids = [torch.zeros(1, 1, dtype=torch.int64)]
    exact = torch.full((1, 2, 16), 7.01, dtype=torch.float64)
    weights = [ExpertWeights(weights[0].w13[:1], weights[0].w2[:1])]
    arguments = problem, dy, x, ids, scores, weights
    for rounding, passes in (("none", False), ("kernel", True)):
        out = reference.backward(*arguments, rounding=rounding, gate_up=[exact])
        assert bool(out["dgu"][0].any()) == passes
        assert out["gate_up"][0].shape == (1, 32)


def test_fp8_takes_the_values_that_forward_used():
    problem = Problem(144, 80, 4, 2, precision="fp8")
    dy, x, ids, scores, masters = setup(problem, (40,))
    forward = reference.forward(problem, x, ids, scores, [masters[0].quantized(problem)])
    values = (
        forward["x_pool"][0].float() * forward["x_pool_scale"][0].repeat_interleave(128, 1)[:, :144]
    )
    stored = [masters[0].quantized(problem)]
    out = reference.backward(problem, dy, x, ids, scores, stored)
    assert torch.equal(out["x_rows"][0], values.bfloat16())
    assert torch.equal(out["gate_up"][0], forward["gate_up"][0].bfloat16())  # made again: forward's
    h = problem.activation(out["gate_up"][0])  # not quantized
    assert_close(out["h"][0], h, relative=1e-6)


def test_fp8_multiplies_quantized_rows_and_weights():
    """dy once, for dh, dw2 and d_s; dgu plane by plane and for dx alone."""
    problem = Problem(272, 144, 4, 2, precision="fp8", bias=True)
    dy, x, ids, scores, masters = setup(problem, (40,))
    stored = masters[0].quantized(problem)
    out = reference.backward(problem, dy, x, ids, scores, [stored])
    dense, rows = stored.dense(problem, torch.float32), out["rows"][0]
    of_dy = dequantize_rows(*quantize_rows(dy[0]))[rows.token]
    assert torch.equal(out["dy_rows"][0], of_dy.bfloat16())
    dh = torch.einsum("mh,mhi->mi", of_dy, dense.w2[rows.expert])
    assert_close(out["dh"][0], dh, relative=1e-5)
    planes = out["dgu"][0].float().split(144, dim=1)
    multiplied = torch.cat([dequantize_rows(*quantize_rows(plane)) for plane in planes], 1)
    dx_rows = torch.einsum("mi,mih->mh", multiplied, dense.w13[rows.expert])
    assert_close(out["dx_rows"][0].float(), dx_rows, relative=3e-3)
    dw2 = torch.stack(
        [
            out["dy_rows"][0][rows.expert == e].float().T @ out["hs"][0][rows.expert == e].float()
            for e in range(4)
        ]
    )
    assert_close(out["dw2"][0].float(), dw2, relative=3e-3)
    exact = reference.backward(problem, dy, x, ids, scores, [stored], rounding="none")
    assert torch.equal(exact["dy_rows"][0], dy[0].float()[rows.token])


def test_check_tokens_is_a_subset_of_the_whole():
    problem = Problem(48, 32, 5, 3, ep_size=2)
    call = setup(problem, routing="dropped")
    whole = reference.backward(problem, *call)
    chosen = [torch.tensor([69, 0, 31]), torch.tensor([], dtype=torch.int64)]
    some = reference.backward(problem, *call, check_tokens=chosen)
    for name in ("dx", "d_topk_weights"):
        assert_close(some[name][0], whole[name][0][chosen[0]], relative=1e-2)
        assert some[name][1].shape[0] == 0
    assert some["dw13"] == some["db2"] == [None, None]
    assert set(some["rows"][0].pool_row.tolist()) < set(whole["rows"][0].pool_row.tolist())


def test_bad_arguments_are_named():
    problem = Problem(48, 32, 5, 3, ep_size=2)
    dy, *call = setup(problem)
    with pytest.raises(ValueError, match="rounding is 'bf16'"):
        reference.backward(problem, dy, *call, rounding="bf16")
    with pytest.raises(ValueError, match="dy has 1 entries, expected one for each rank"):
        reference.backward(problem, dy[:1], *call)
    with pytest.raises(ValueError, match=r"gate_up.shape is \[2, 64\], expected \d+ rows of 64"):
        reference.backward(problem, dy, *call, gate_up=[torch.zeros(2, 64)] * 2)
