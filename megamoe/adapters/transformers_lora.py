"""Compute packed experts with LoRA by the operators of megamoe.ops, without a merged copy of the weights.

A few experts at a time are dequantized to bf16, into a panel that holds their low-rank factors next to the weights. So
one product computes both terms, and the activation stays in its epilogue:

    forward    [x, x A^T] [W, B]^T       = x W^T + (x A^T) B^T
    backward   [dy, dy B] [W; A]         = dy W + (dy B) A
    factors    dA = (dy B)^T x, dB = dy^T (x A^T), of the rows of each expert

Weights have no gradients. Pre-activations are saved in bf16; everything else is computed again in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megamoe import ops
from megamoe.adapters.library_parameters import in_turn
from megamoe.core.config import Activation
from megamoe.formats.weights import ExpertWeights
from megamoe.launch.passes import dequantize_mxfp4
from megamoe.ops.groups import Groups
from megamoe.ops.reference import column_sums

PANEL_BYTES = 1 << 28
_UNIT = 8  # of widths that operators take; ranks are padded

Factors = tuple[Tensor, Tensor, float]  # B [E, N, r], A [E, r, K], and their product's factor
_mm: Any = ops.grouped_mm


class _Rows:
    """Sort rows by expert: each token has top_k. The host waits for the experts' ends."""

    def __init__(self, ids: Tensor, num_experts: int) -> None:
        routes, self.order = ids.flatten().sort(stable=True)
        self.places, self.top_k = self.order.argsort(), ids.shape[1]
        experts = torch.arange(num_experts, device=ids.device, dtype=ids.dtype)
        self.offs = torch.searchsorted(routes, experts, right=True, out_int32=True)
        self.ends: list[int] = self.offs.tolist()

    def of(self, tokens: Tensor) -> Tensor:
        return tokens[self.order // self.top_k]

    def sum(self, rows: Tensor) -> Tensor:
        """[M, N] -> sums over each token's rows [T, N]."""
        return rows[self.places].unflatten(0, (-1, self.top_k)).sum(1)

    def append_product(self, t: Tensor, factor: Tensor) -> Tensor:
        """t: [M, K], factor: [E, K, r] -> t and their product [M, K + r]."""
        return torch.cat((t, _mm(t, factor, offs=self.offs)), 1) if factor.shape[2] else t


class _Matrix(NamedTuple):
    """Hold w13 or w2 packed, as ExpertWeights has it, and factors. Without LoRA their rank is 0."""

    packed: Tensor
    scale: Tensor | None
    planes: int
    a: Tensor  # [E, r, K]
    b: Tensor  # [E, N, r]

    def multiply(
        self, rows: _Rows, product: Callable[..., Any], backward: bool = False
    ) -> list[Tensor]:
        """Return the results of all panels [n, K + r, N], in backward [n, N + r, K].

        product: a function of the panel, its slices of rows and experts, and where experts end in the slice of rows.
        """
        (num, rank, k), n, made, last = self.a.shape, self.b.shape[1], [], 0
        step, ends = max(1, PANEL_BYTES // (2 * n * k)), [0, *rows.ends]
        while last < num:
            first, last = last, min(last + step, num)
            experts, row_slice = slice(first, last), slice(ends[first], ends[last])
            if row_slice.start == row_slice.stop:
                continue
            shape = (last - first, n + rank, k) if backward else (last - first, n, k + rank)
            panel = self.b.new_empty(shape)
            factors = panel[:, n:] if backward else panel[:, :, k:]
            factors.copy_((self.a if backward else self.b)[experts])
            assert self.scale is not None
            packed = self.packed[experts], self.scale[experts]
            dequantize_mxfp4(*packed, self.planes, panel[:, :n, :k])
            offs = rows.offs[experts] - row_slice.start
            made.append(product(panel if backward else panel.mT, row_slice, experts, offs))
        return [torch.cat(parts) for parts in zip(*made, strict=True)]

    def gradients(self, x: Tensor, dy: Tensor, rows: _Rows) -> tuple[Tensor, Tensor]:
        """x: [M, K], dy: [M, N + r], with dy B -> gradients of a and b."""
        if not self.a.shape[1]:
            return self.a, self.b
        dy, low = dy.tensor_split((self.b.shape[1],), 1)
        across = _mm(x, self.a.mT, offs=rows.offs)
        return _mm(low.mT, x, offs=rows.offs), _mm(dy.mT, across, offs=rows.offs)


def _times(t: Tensor) -> Callable[..., Any]:
    """Return the product of multiply() that multiplies rows t, as append_product() has made them."""
    return lambda w, row_slice, _, offs: (_mm(t[row_slice], w, offs=offs),)


class _Experts(torch.autograd.Function):
    """x: [T, H], scale: of rows [M] fp32, bias: of w13 [E, P*I] -> [T, H] without w2's bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, bias: Tensor | None, *given: Any) -> Tensor:
        *factors, rows, weights, act = given
        first, second = _matrices(weights, act, *factors)
        wide = rows.append_product(rows.of(x), first.a.mT)

        def activate(w: Tensor, of: slice, experts: slice, offs: Tensor) -> Any:
            biases = None if bias is None else bias[experts]
            options: Any = {"offs": offs, "bias": biases, "row_scale": scale[of]}
            return ops.grouped_mm_act(wide[of], w, act, return_pre=True, **options)

        h, pre = first.multiply(rows, activate)
        ctx.save_for_backward(x, scale, pre, *factors)
        ctx.others = rows, weights, act
        return rows.sum(*second.multiply(rows, _times(rows.append_product(h, second.a.mT))))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, scale, pre, *factors = ctx.saved_tensors
        rows, weights, act = ctx.others
        first, second = _matrices(weights, act, *factors)
        dy = rows.append_product(rows.of(grad.bfloat16()), second.b)

        def through(w: Tensor, of: slice, _: slice, offs: Tensor) -> Any:
            return ops.grouped_mm_dact(dy[of], w, pre[of], act, offs=offs, row_scale=scale[of])

        d_pre, h, d_scale = second.multiply(rows, through, backward=True)
        wide = rows.append_product(d_pre, first.b)
        dx = rows.sum(*first.multiply(rows, _times(wide), backward=True))
        d_bias = column_sums(d_pre, Groups(rows.offs, 1)) if ctx.needs_input_grad[2] else None
        of_first = first.gradients(rows.of(x), wide, rows)
        of_factors = *of_first, *second.gradients(h, dy, rows)
        return dx, d_scale, d_bias, *of_factors, None, None, None


def _matrices(weights: ExpertWeights, act: Activation, *of: Tensor) -> tuple[_Matrix, _Matrix]:
    first = _Matrix(weights.w13, weights.w13_scale, act.planes, *of[:2])
    return first, _Matrix(weights.w2, weights.w2_scale, 1, *of[2:])


def _joined(adapters: Iterable[Factors]) -> tuple[Tensor, Tensor]:
    """Return the factors of all adapters as one pair a [E, r, K], b [E, N, r]."""
    b, a = zip(*((b * scale, a) for b, a, scale in adapters), strict=True)
    across, whole = torch.cat(a, 1).bfloat16(), torch.cat(b, 2).bfloat16()
    padding = -across.shape[1] % _UNIT
    return F.pad(across, (0, 0, 0, padding)), F.pad(whole, (0, padding))


def run_with_lora(
    adapters: Mapping[str, Iterable[Factors]], act: Activation, x: Tensor, ids: Tensor,
    scores: Tensor, weights: ExpertWeights,
) -> Tensor:  # fmt: skip
    """Compute GPT-OSS's experts with LoRA; differentiable in x, scores, factors and biases.

    adapters: of "gate_up_proj", whose rows alternate, and "down_proj". weights: in MXFP4. x: [T, H] bf16, ids, scores:
    [T, K] -> [T, H] bf16.
    """
    if not len(x):
        return x
    num, hidden, width = len(weights.w2), x.shape[1], 2 * weights.w2.shape[2]
    shapes = {"gate_up_proj": (act.planes * width, hidden), "down_proj": (hidden, width)}
    given: list[Tensor] = []
    for name, (n, k) in shapes.items():
        none = [(x.new_empty(num, n, 0), x.new_empty(num, 0, k), 1.0)]
        given += _joined(adapters.get(name, none))
    if act.planes == 2:
        given[1] = in_turn(given[1]).flatten(1, 2)
    rows, of_routes = _Rows(ids, num), scores.float().flatten()
    scale, others = of_routes[rows.order], (*given, rows, weights, act)
    y: Tensor = _Experts.apply(x, scale, weights.b13, *others)
    if weights.b2 is None:
        return y
    of_experts = scores.new_zeros((len(x), num), dtype=torch.float32)
    return (y + of_experts.scatter_add(1, ids, scores.float()) @ weights.b2).to(x.dtype)
