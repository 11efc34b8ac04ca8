"""A layer's GEMMs alone, in turns with the layer: torch's products over rows that stand sorted by expert."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import megamoe
from megamoe.backends import select
from megamoe.backends.call import Backend, Call, Gradients, GradRequest
from megamoe.formats.quantization import quantize_tokens

NAME = "gemms"
# In FP8 torch has a grouped product by token and channel alone. By blocks of 128 more is to be computed, not less.
PRECISION_OF_TORCH = {"bf16": "bf16", "fp8": "fp8_channel", "fp8_channel": "fp8_channel"}


def grouped_mm(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """a [M, K], b [E, K, N] -> [M, N]; or a [K, M], b [M, N] -> [E, K, N]. ends: [E] int32, of each expert's rows."""
    return F.grouped_mm(a, b, offs=ends)


def scaled_mm(x: Tensor, w: Tensor, scales: tuple[Any, Any], ends: Tensor) -> Tensor:
    """x: [M, K], w: [E, K, N], both e4m3, scales: [M, 1], [E, N, 1] -> [M, N] bf16; on CPUs of their values."""
    of_rows, of_columns = (t[..., 0] for t in scales)
    if x.is_cuda:
        product: Any = torch._scaled_grouped_mm
        options = {"offs": ends, "out_dtype": torch.bfloat16, "use_fast_accum": True}
        made: Tensor = product(x, w, of_rows, of_columns, **options)
        return made
    rows, matrices = x.float() * of_rows[:, None], w.float() * of_columns[:, None]
    return grouped_mm(rows.bfloat16(), matrices.bfloat16(), ends)


class Gemms(Backend):
    """The least that a layer's arithmetic takes: no routing, activation, sums, and no y. BF16, FP8 forward.

    Rows are those of all ranks' routes to this rank's experts: of x, and of h, dgu and dy drawn once. forward: both
    GEMMs; backward: dh, dx, dw13 and dw2. Ranks meet once, for x and ids of other calls, which are as many on each.
    """

    state_bytes = 1

    def __init__(self, problem: megamoe.Problem, group: Any = None) -> None:
        if problem.precision not in PRECISION_OF_TORCH:
            raise SystemExit("--baseline gemms: expected BF16, or FP8 forward")
        self.problem, self.group = problem, group
        self._ids: Tensor | None = None  # that the rows were made of

    def _of_ranks(self, t: Tensor) -> Tensor:
        """t: [T, n] -> [R T, n], rank by rank."""
        if self.problem.ep_size == 1:
            return t
        out = t.new_empty(self.problem.ep_size * len(t), t.shape[1])
        dist.all_gather(
            [*out.chunk(self.problem.ep_size)], t.contiguous(), group=self.group.process_group
        )
        return out

    def _rows(self, call: Call) -> None:
        """Make the rows of a call's routes, sorted by expert; outside of what is timed, in its first call."""
        if self._ids is call.topk_ids:
            return
        p, ids = self.problem, call.topk_ids
        x, everyones = self._of_ranks(call.rows[0]), self._of_ranks(ids)
        experts, order = everyones.flatten().long().sort(stable=True)
        counts, begin = torch.bincount(experts, minlength=p.num_experts), p.expert_begin()
        own, before = counts[begin : p.expert_begin(p.rank + 1)], int(counts[:begin].sum())
        order = order[before : before + int(own.sum())]
        self.ends = own.cumsum(0).int()
        self.x, width = x[order // p.top_k], p.activation.planes * p.intermediate
        self.h, self.dgu = x.new_empty(len(order), p.intermediate), x.new_empty(len(order), width)
        self.dy = torch.empty_like(self.x)
        for drawn in (self.h, self.dgu, self.dy):
            drawn.normal_()
        if p.formats.w.scaled:
            (self.x, self.of_x), (self.h, self.of_h) = map(quantize_tokens, (self.x, self.h))
        self._ids = ids

    def forward(self, call: Call, keep: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return gemm2's rows [T*K, H] in place of y."""
        self._rows(call)
        w, ends = call.weights, self.ends
        if self.problem.formats.w.scaled:
            scaled_mm(self.x, w.w13.mT, (self.of_x, w.w13_scale), ends)
            return scaled_mm(self.h, w.w2.mT, (self.of_h, w.w2_scale), ends), None
        grouped_mm(self.x, w.w13.mT, ends)
        return grouped_mm(self.h, w.w2.mT, ends), ends if keep else None

    def backward(self, call: Call, dy: Tensor, state: Tensor, wanted: GradRequest) -> Gradients:
        """Return dx's rows and the weights' gradients."""
        self._rows(call)
        grouped_mm(self.dy, call.weights.w2, self.ends)
        dx_rows = grouped_mm(self.dgu, call.weights.w13, self.ends)
        dw13 = grouped_mm(self.dgu.T, self.x, self.ends)
        return Gradients(x=dx_rows, w13=dw13, w2=grouped_mm(self.dy.T, self.h, self.ends))


def register() -> None:
    """Let make_backend() know it."""
    select.BACKENDS[NAME] = Gemms
