"""The GEMMs alone of a sweep are those of the layer: rows of its routes by expert, all products of both passes."""

from argparse import Namespace
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from bench.gemms import Gemms
from bench.sweep import entries
from megamoe import Problem
from megamoe.backends.call import Call, GradRequest
from megamoe.formats.quantization import quantize_tokens
from megamoe.group.group import Group
from megamoe.testing import launch, make_inputs, make_weights

P = Problem(64, 48, 6, 3, max_tokens=16)


def by_expert(ids, product):
    """Return what `product` makes of each expert's rows, (expert, slice), one below the other."""
    ends = torch.bincount(ids.flatten().long(), minlength=P.num_experts).cumsum(0).tolist()
    return [product(e, slice(a, b)) for e, (a, b) in enumerate(zip([0, *ends], ends, strict=False))]


def test_products_are_those_of_the_routes():
    drawn, w = make_inputs(P, 13), make_weights(P)
    call, alone = Call(drawn.x, drawn.topk_ids, drawn.topk_weights, w), Gemms(P)
    y_rows, state = alone.forward(call, keep=True)
    order = drawn.topk_ids.flatten().argsort(stable=True)
    assert torch.equal(alone.x, drawn.x[order // P.top_k])
    close = {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(
        y_rows, torch.cat(by_expert(drawn.topk_ids, lambda e, r: alone.h[r] @ w.w2[e].T)), **close
    )
    found = alone.backward(call, drawn.x, state, GradRequest())
    expected = {
        "x": torch.cat(by_expert(drawn.topk_ids, lambda e, r: alone.dgu[r] @ w.w13[e])),
        "w13": torch.stack(by_expert(drawn.topk_ids, lambda e, r: alone.dgu[r].T @ alone.x[r])),
        "w2": torch.stack(by_expert(drawn.topk_ids, lambda e, r: alone.dy[r].T @ alone.h[r])),
    }
    for name, value in expected.items():
        torch.testing.assert_close(getattr(found, name), value, rtol=2e-2, atol=0.1)


def test_products_in_fp8_are_those_of_tokens_and_channels():
    p = replace(P, precision="fp8_channel")
    drawn, w = make_inputs(p, 13), make_weights(p)
    alone = Gemms(p)
    y_rows, _ = alone.forward(Call(drawn.x, drawn.topk_ids, drawn.topk_weights, w))
    order = drawn.topk_ids.flatten().argsort(stable=True)
    assert torch.equal(
        alone.x.view(torch.uint8), quantize_tokens(drawn.x)[0][order // p.top_k].view(torch.uint8)
    )
    h, w2 = alone.h.float() * alone.of_h, w.w2.float() * w.w2_scale
    expected = torch.cat(by_expert(drawn.topk_ids, lambda e, r: h[r] @ w2[e].T))
    torch.testing.assert_close(y_rows.float(), expected, rtol=2e-2, atol=0.1)
    for name in ("fp8", "fp8_channel", "bf16"):
        args = Namespace(direction="forward", baseline=["gemms", "staged"], backend="mega",
                         main_grad=False, weight_gradients=[None], frozen=False,
                         reserve_sms=["0"], layer=False, quantized_x=False)  # fmt: skip
        own = "bf16" if name == "bf16" else "fp8_channel"
        assert [e.precision for e in entries(name, args)] == [name, own, "bf16"]


def test_other_ids_are_other_rows():
    alone, w = Gemms(P), make_weights(P)
    for tokens in (13, 5):
        drawn = make_inputs(P, tokens)
        y_rows, _ = alone.forward(Call(drawn.x, drawn.topk_ids, drawn.topk_weights, w))
        assert y_rows.shape == (tokens * P.top_k, P.hidden)


def rows_of_ranks(rank):
    """Return whether a rank of two has the rows of all routes to its experts, and gemm2's of them."""
    p = replace(P, num_experts=5, ep_size=2, rank=rank)
    drawn, w = [make_inputs(p, 13, rank=r) for r in range(2)], make_weights(p)
    alone = Gemms(p, Group(dist.group.WORLD))
    y_rows, _ = alone.forward(
        Call(drawn[rank].x, drawn[rank].topk_ids, drawn[rank].topk_weights, w)
    )
    expected = []
    for expert in range(p.expert_begin(), p.expert_begin(rank + 1)):
        chosen = [d.x[token] for d in drawn for token in (d.topk_ids == expert).nonzero()[:, 0]]
        expected.append(torch.stack(chosen))
    ends = torch.tensor([len(rows) for rows in expected]).cumsum(0)
    return (
        torch.equal(alone.x, torch.cat(expected)),
        torch.equal(alone.ends, ends.int()),
        y_rows.shape == (int(ends[-1]), p.hidden),
    )


def test_rows_of_all_ranks_to_own_experts():
    assert launch(rows_of_ranks, 2, timeout_s=60) == [(True, True, True)] * 2


def test_precisions_without_a_product_of_their_own_are_refused():
    with pytest.raises(SystemExit, match="--baseline gemms"):
        Gemms(replace(P, hidden=128, intermediate=128, precision="fp8xmxfp4"))
