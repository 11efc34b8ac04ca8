"""The oracle against a formula on one line, its row order, its rounding, its sampling."""

from dataclasses import replace

import pytest
import torch

from megamoe.backends import reference
from megamoe.backends.reference.route import route
from megamoe.core.config import Problem
from megamoe.testing import ROUTINGS, assert_close, compare, make_inputs, make_weights


def setup(problem, tokens=(70, 33), routing="uniform"):
    ranks = range(problem.ep_size)
    inputs = [make_inputs(problem, tokens[r], rank=r, routing=routing) for r in ranks]
    columns = zip(*((i.x, i.topk_ids, i.topk_weights) for i in inputs), strict=True)
    weights = [make_weights(problem, rank=r) for r in ranks]
    return (*map(list, columns), weights)


def naive(problem, x, ids, scores, weights):
    """Token by token, in fp64."""
    y = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(x.shape[0]):
        for k in range(problem.top_k):
            e = int(ids[t, k])
            if not 0 <= e < problem.num_experts:
                continue
            owner = problem.rank_of_expert(e)
            w, local = weights[owner], e - problem.expert_begin(owner)
            gate_up = w.w13[local].double() @ x[t].double()
            gate_up = gate_up if w.b13 is None else gate_up + w.b13[local]
            y_row = w.w2[local].double() @ problem.activation(gate_up).double()
            y_row = y_row if w.b2 is None else y_row + w.b2[local]
            y[t] += scores[t, k].double() * y_row
    return y


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("activation", ["swiglu_oai", "relu2"])
def test_matches_the_definition(routing, activation):
    problem = Problem(32, 48, 5, 3, ep_size=2, activation=activation, bias=True)
    x, ids, scores, weights = setup(problem, (21, 6), routing)
    exact = reference.forward(problem, x, ids, scores, weights, rounding="none")["y"]
    kernel = reference.forward(problem, x, ids, scores, weights)["y"]
    for r in range(2):
        expected = naive(problem, x[r], ids[r], scores[r], weights)
        assert_close(exact[r], expected, relative=1e-5)
        assert_close(kernel[r], expected, relative=1e-2)
        assert kernel[r].dtype == torch.bfloat16
    assert (
        compare(torch.cat(exact), torch.cat(exact).flip(0)).relative > 0.1
        or routing == "all_dropped"
    )


def test_row_order_and_pool_rows():
    problem = Problem(16, 16, 5, 3, ep_size=2)
    x, ids, _, _ = setup(problem, (70, 33), "dropped")
    for rank in range(2):
        rows = route(problem, rank, ids)
        begin, num = problem.expert_begin(rank), problem.num_local_experts(rank)
        expected, pool_rows, counts, next_row = [], [], torch.zeros_like(rows.counts), 0
        for e in range(begin, begin + num):  # the definition, written as loops
            next_row = -(-next_row // 128) * 128
            for chunk in range(6):
                home, first = chunk % 2, chunk // 2 * 32
                for k in range(3):
                    for t in range(first, min(first + 32, ids[home].shape[0])):
                        if ids[home][t, k] == e:
                            expected.append((home, t + 70 * home, k, e - begin))
                            pool_rows.append(next_row)
                            counts[chunk, e - begin] += 1
                            next_row += 1
        found = torch.stack([rows.home, rows.token, rows.k, rows.expert], dim=1).tolist()
        assert [tuple(row) for row in found] == expected
        assert rows.pool_row.tolist() == pool_rows
        assert torch.equal(rows.counts, counts)


def test_intermediates_are_there_and_fit():
    problem = Problem(144, 80, 4, 2, ep_size=2, precision="fp8")
    out = reference.forward(problem, *setup(problem))
    for rank in range(2):
        rows = out["rows"][rank].token.numel()
        shapes = {
            "x_pool": (rows, 144),
            "x_pool_scale": (rows, 2),
            "gate_up": (rows, 160),
            "h": (rows, 80),
            "h_scale": (rows, 1),
            "y_rows": (rows, 144),
            "partials": (103, 144),
        }
        assert {name: tuple(out[name][rank].shape) for name in shapes} == shapes
        assert out["counts"][rank].sum() == rows
    dtypes = {name: out[name][0].dtype for name in ("x_pool", "h", "y_rows", "partials", "y")}
    assert dtypes["x_pool"] == dtypes["h"] == torch.float8_e4m3fn
    assert dtypes["y_rows"] == dtypes["partials"] == dtypes["y"] == torch.bfloat16


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("rounding", ["kernel", "none"])
def test_check_tokens_is_a_subset_of_the_whole(precision, rounding):
    problem = Problem(144, 80, 5, 3, ep_size=2, precision=precision)
    arguments = setup(problem, routing="dropped")
    whole = reference.forward(problem, *arguments, rounding=rounding)
    chosen = [torch.tensor([69, 0, 31]), torch.tensor([], dtype=torch.int64)]
    some = reference.forward(problem, *arguments, rounding=rounding, check_tokens=chosen)
    assert_close(
        some["y"][0], whole["y"][0][chosen[0]], relative=1e-2 if rounding == "kernel" else 1e-5
    )
    assert some["y"][1].shape == (0, 144)
    for rank in range(2):
        kept = set(some["rows"][rank].pool_row.tolist())
        assert kept <= set(whole["rows"][rank].pool_row.tolist())
        assert torch.equal(some["counts"][rank], whole["counts"][rank])


def test_quantization_costs_what_it_should():
    fp8 = Problem(256, 128, 4, 2, precision="fp8", max_tokens=64)
    bf16 = replace(fp8, precision="bf16")
    inputs = make_inputs(fp8, 64)
    triple = [inputs.x], [inputs.topk_ids], [inputs.topk_weights]
    quantized = make_weights(fp8)
    kernel = reference.forward(fp8, *triple, [quantized])["y"][0]
    tight = reference.forward(fp8, *triple, [quantized], rounding="none")["y"][0]
    loose = reference.forward(bf16, *triple, [make_weights(bf16)], rounding="none")["y"][0]
    assert 1e-3 < compare(kernel, tight).relative < 0.04
    assert 0.01 < compare(kernel, loose).relative < 0.08


def test_result_does_not_depend_on_the_number_of_ranks():
    one, three = Problem(64, 32, 7, 3), Problem(64, 32, 7, 3, ep_size=3)
    inputs = [make_inputs(three, n, rank=r) for r, n in enumerate((40, 0, 9))]
    columns = [
        [i.x for i in inputs],
        [i.topk_ids for i in inputs],
        [i.topk_weights for i in inputs],
    ]
    spread = reference.forward(
        three, *columns, [make_weights(three, rank=r) for r in range(3)], rounding="none"
    )
    alone = reference.forward(
        one, *([torch.cat(c)] for c in columns), [make_weights(one)], rounding="none"
    )
    assert_close(torch.cat(spread["y"]), alone["y"][0], relative=1e-6)


def test_no_row_of_x_is_a_row_of_weights():
    """Equal seeds would make them equal, and sums of many standard deviations of them."""
    problem = Problem(64, 32, 3, 2)
    x = torch.cat([make_inputs(problem, 40, seed=seed).x for seed in (0, 7)])
    w = make_weights(problem)
    for rows in (w.w13.flatten(0, 1), w.w2.flatten().view(-1, 64)):
        cosines = torch.cosine_similarity(x[:, None].float(), rows[None].float(), dim=2)
        assert cosines.abs().max() < 0.8


@pytest.mark.parametrize("at_once", [5, 1 << 26])
def test_comparison_finds_the_first_difference(monkeypatch, at_once):
    monkeypatch.setitem(compare.__globals__, "AT_ONCE", at_once)
    a = torch.arange(24.0).reshape(4, 6)
    b = a.clone()
    assert str(compare(a, b)) == "equal"
    b[2, 3] += 1
    b[3, 0] = float("nan")
    found = compare(a, b)
    assert (found.first, found.differing, found.actual, found.expected) == ((2, 3), 2, 15, 16)
    assert found.largest == float("inf")
    b[3, 0] = 18
    assert compare(a, b).relative == pytest.approx(1 / b.norm().item(), rel=1e-6)
    assert compare(a, b, 1.0).differing == 0
    assert compare(a, b, torch.tensor([[0.0], [1.0], [0.5], [1.0]])).first == (2, 3)
    assert compare(a, b, lambda got, want: 0.06 * want.double()).first == (2, 3)
    assert compare(a, b, lambda got, want: 0.07 * want.double()).differing == 0
    b[3, 0] = float("nan")
    a[3, 0] = float("nan")
    assert compare(a, b).differing == 1
    with pytest.raises(AssertionError, match=r"rows: .*first at \[2, 3\]"):
        assert_close(a, b, relative=1e-3, name="rows")
    with pytest.raises(AssertionError, match="shape"):
        compare(a, b[:2])
