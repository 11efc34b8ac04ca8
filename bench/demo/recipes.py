"""Simulate recipes of FP8 training that no kernel has: how x and dy are scaled, in which format gradients are.

One rank, in torch, vectorized, for curves. A product rounds where the kernel does (docs/numerics.md), but on a GPU
operands and sums are rounded to bf16: 1.7e-3, next to 2.6e-2 of e4m3.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megamoe import ExpertWeights, Problem
from megamoe.backends.reference.backward import activation_gradient
from megamoe.backends.reference.quant import GROUP, power_of_two
from megamoe.launch.cache import quantize_weights

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@dataclass(frozen=True)
class Fp8Recipe:
    """What differs between recipes.

    rows: scales of x and dy: "group", fp32 for 1 x 128; "power", a power of two for 1 x 128; "token", fp32 for a row.
    gradients: format of dy and dgu. products: what weight gradients multiply, "bf16" or "e4m3".
    """

    rows: str = "group"
    gradients: torch.dtype = E4M3
    products: str = "e4m3"


class Scaled(NamedTuple):
    """8-bit numbers as fp32, their scales, expanded to columns, and the format."""

    q: Tensor
    scale: Tensor
    dtype: torch.dtype

    @property
    def values(self) -> Tensor:
        return self.q * self.scale


def power(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the least powers of two that are not below amax / the format's largest number."""
    return power_of_two(amax / (torch.finfo(dtype).max / 448.0))  # 57344 is 2^7 * 448


def quantize_rows(v: Tensor, rows: str, dtype: torch.dtype = E4M3) -> Scaled:
    """v: [M, N] -> its numbers with scales by row and group."""
    width = v.shape[1] if rows == "token" else GROUP
    groups = -(-v.shape[1] // width)
    padded = nn.functional.pad(v.float(), (0, groups * width - v.shape[1])).unflatten(
        1, (-1, width)
    )
    amax = padded.abs().amax(2, keepdim=True).clamp(min=1e-10)
    limit = torch.full_like(amax, torch.finfo(dtype).max)
    scale, inverse = amax / limit, limit / amax
    if rows == "power":
        scale = power(amax, dtype)
        inverse = 1 / scale
    q = rounded(padded * inverse, dtype)
    return Scaled(
        q.flatten(1)[:, : v.shape[1]], scale.expand_as(q).flatten(1)[:, : v.shape[1]], dtype
    )


def rounded(v: Tensor, dtype: torch.dtype) -> Tensor:
    largest = torch.finfo(dtype).max
    return v.clamp(-largest, largest).to(dtype).float()


def transposed(v: Tensor, amax: Tensor, width: int, dtype: torch.dtype = E4M3) -> Tensor:
    """Round as what weight gradients multiply: by powers of two for 128 rows and `width` columns.

    v, amax: [M, N], M a multiple of 128; amax: at least the largest magnitude of the row's group.
    """
    groups = -(-v.shape[1] // width)
    padded = nn.functional.pad(amax.float(), (0, groups * width - v.shape[1]))
    largest = padded.view(-1, GROUP, groups, width).amax((1, 3), keepdim=True)
    scale = power(largest, dtype).expand(-1, GROUP, -1, width).flatten(2).flatten(0, 1)
    scale = scale[:, : v.shape[1]]
    return rounded(v / scale, dtype) * scale


class Pool(NamedTuple):
    """Rows by expert, each expert's in blocks of 128."""

    token: Tensor  # [T*K] of a route, by expert
    route: Tensor  # [T*K]
    row: Tensor  # [T*K] its row in the pool
    ends: Tensor  # [E] int32, the row behind each expert's last block
    num_rows: int

    @classmethod
    def of(cls, ids: Tensor, num_experts: int) -> "Pool":
        flat = ids.flatten().long()
        route = flat.argsort(stable=True)
        counts = torch.zeros(num_experts, dtype=torch.int64, device=ids.device)
        counts.scatter_add_(0, flat, torch.ones_like(flat))
        blocks = (counts + GROUP - 1) // GROUP
        ends = GROUP * blocks.cumsum(0)
        first = ends - GROUP * blocks - (counts.cumsum(0) - counts)
        row = first[flat[route]] + torch.arange(len(flat), device=ids.device)
        num_rows = GROUP * (-(-len(flat) // GROUP) + num_experts)
        return cls(route // ids.shape[1], route, row, ends.int(), num_rows)

    def rows(self, of_tokens: Tensor) -> Tensor:
        """[T, N] -> [M, N], zeros between experts."""
        out = of_tokens.new_zeros(self.num_rows, of_tokens.shape[1])
        return out.index_copy(0, self.row, of_tokens[self.token])

    def tokens(self, rows: Tensor, num_tokens: int) -> Tensor:
        """Return sums of a token's rows, [T, N] fp32."""
        by_route = rows.new_empty(len(self.route), rows.shape[1], dtype=torch.float32)
        by_route = by_route.index_copy(0, self.route, rows[self.row].float())
        return by_route.view(num_tokens, -1, rows.shape[1]).sum(1)

    def multiply(self, rows: Tensor, w: Tensor) -> Tensor:
        """rows: [M, K], w: [E, N, K] -> [M, N] fp32."""
        if rows.is_cuda:
            parts = rows.bfloat16(), w.bfloat16().transpose(1, 2)
            return torch._grouped_mm(*parts, offs=self.ends).float()
        out = rows.new_zeros(self.num_rows, w.shape[1])
        for expert, part in enumerate(self._parts()):
            out[part] = rows[part] @ w[expert].float().T
        return out

    def outer(self, a: Tensor, b: Tensor) -> Tensor:
        """a: [M, N], b: [M, K] -> [E, N, K]: sums of products over an expert's rows."""
        if a.is_cuda:
            return torch._grouped_mm(a.bfloat16().T, b.bfloat16(), offs=self.ends)
        return torch.stack([a[part].T @ b[part] for part in self._parts()])

    def _parts(self) -> list[slice]:
        ends = self.ends.tolist()
        return [slice(*pair) for pair in zip([0, *ends], ends, strict=False)]


def stored_values(problem: Problem, w13: Tensor, w2: Tensor) -> ExpertWeights:
    """Return what masters are quantized to, in the type that multiply() takes."""
    pairs = [
        quantize_weights(w, planes, problem.formats.w, None, False, None)[0]
        for w, planes in ((w13, 2), (w2, 1))
    ]
    (q13, s13), (q2, s2) = pairs
    dtype = torch.bfloat16 if w13.is_cuda else torch.float32
    return ExpertWeights(q13, q2, None, None, s13, s2).dense(problem, dtype)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, how: tuple[Problem, Fp8Recipe], *tensors: Tensor) -> Tensor:
        x, ids, s, w13, w2 = tensors
        problem, recipe = how
        stored = stored_values(problem, w13, w2)
        pool = Pool.of(ids, problem.num_experts)
        given = quantize_rows(x, recipe.rows)
        gate_up = pool.multiply(pool.rows(given.values), stored.w13)
        h = quantize_rows(problem.activation(gate_up), "group").values
        y_rows = pool.multiply(h, stored.w2).bfloat16()
        weight = pool.rows(s.new_zeros(len(x), 1))  # [M, 1]
        weight[pool.row, 0] = s.flatten()[pool.route]
        ctx.save_for_backward(x, gate_up.bfloat16(), weight, stored.w13, stored.w2)
        ctx.how, ctx.pool = how, pool
        return pool.tokens(weight * y_rows.float(), len(x)).bfloat16()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, gate_up, weight, w13, w2 = ctx.saved_tensors
        (problem, recipe), pool = ctx.how, ctx.pool
        of_x = Scaled(*_rows(pool, quantize_rows(x, recipe.rows)))
        of_dy = Scaled(*_rows(pool, quantize_rows(dy, recipe.rows, recipe.gradients)))
        dh = pool.multiply(of_dy.values, w2.transpose(1, 2))
        unscaled, h = activation_gradient(problem.activation, gate_up.float(), dh)
        d_s = (dh * h).sum(1)
        dgu, hs = ((weight * v).bfloat16().float() for v in (unscaled, h))
        planes = [
            quantize_rows(plane, "group", recipe.gradients).values for plane in dgu.chunk(2, 1)
        ]
        dx_rows = pool.multiply(torch.cat(planes, 1), w13.transpose(1, 2)).bfloat16()
        dw13, dw2 = _weight_gradients(recipe, pool, of_x, of_dy, dgu, hs)
        d_weights = torch.empty_like(d_s[: len(pool.route)])
        d_weights[pool.route] = d_s[pool.row]
        dx = pool.tokens(dx_rows, len(x)).to(x.dtype)
        return None, dx, None, d_weights.view(len(x), -1), dw13, dw2


def _rows(pool: Pool, of_tokens: Scaled) -> tuple[Tensor, Tensor, torch.dtype]:
    return pool.rows(of_tokens.q), pool.rows(of_tokens.scale), of_tokens.dtype


def _weight_gradients(
    recipe: Fp8Recipe, pool: Pool, x: Scaled, dy: Scaled, dgu: Tensor, hs: Tensor
) -> tuple[Tensor, Tensor]:
    """Return dw13, dw2 in bf16. dgu, hs: as bf16 has them."""
    if recipe.products != "e4m3":
        x_rows, dy_rows = (v.values.bfloat16().float() for v in (x, dy))
    elif recipe.rows == "token":  # a factor of the row, which the other operand takes over
        dgu, hs = dgu * x.scale[:, :1], hs * dy.scale[:, :1]
        x_rows, dy_rows = x.q, dy.q
    else:
        x_rows, dy_rows = (
            transposed(v.values, v.scale * torch.finfo(v.dtype).max, GROUP, v.dtype)
            for v in (x, dy)
        )
    if recipe.products == "e4m3":
        dgu = transposed(dgu, dgu.abs(), 1, recipe.gradients)
        hs = transposed(hs, hs.abs(), GROUP)
    return pool.outer(dgu, x_rows).bfloat16(), pool.outer(dy_rows, hs).bfloat16()


class SimulatedExperts(nn.Module):
    """What the demo needs of a MegaMoE, on one rank, by a recipe of no kernel."""

    def __init__(
        self, hidden: int, intermediate: int, num_experts: int, top_k: int, **options: Any
    ) -> None:
        super().__init__()
        self.recipe: Fp8Recipe = options["recipe"]
        self.problem = Problem(hidden, intermediate, num_experts, top_k, precision="fp8")
        w13 = torch.empty(num_experts, 2 * intermediate, hidden, dtype=torch.bfloat16)
        w2 = torch.empty(num_experts, hidden, intermediate, dtype=torch.bfloat16)
        self.w13, self.w2 = nn.Parameter(w13), nn.Parameter(w2)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        made: Tensor = _Experts.apply(
            (self.problem, self.recipe), x, ids, weights, self.w13, self.w2
        )
        return made

    def close(self) -> None:
        """Do nothing: it shares nothing."""
