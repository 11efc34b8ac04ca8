"""A layer's GEMMs alone, in turns with the layer: torch's grouped_mm over rows that stand sorted by expert."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import megamoe
from megamoe.backends.call import Backend, Call, Gradients, Wanted
from megamoe.layer import functional

NAME = "gemms"


def grouped_mm(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """a [M, K], b [E, K, N] -> [M, N]; or a [K, M], b [M, N] -> [E, K, N]. ends: [E] int32, of each expert's rows."""
    mm = getattr(F, "grouped_mm", None) or torch._grouped_mm
    out: Tensor = mm(a, b, offs=ends)
    return out


class Gemms(Backend):
    """The least that a layer's arithmetic takes: no routing, activation, sums, and no y. One rank, BF16.

    Rows are those of the call's routes: of x, and of h, dgu and dy drawn once. forward: both GEMMs; backward: dh, dx,
    dw13 and dw2.
    """

    state_bytes = 1

    def __init__(self, problem: megamoe.Problem, group: Any = None) -> None:
        if problem.ep_size > 1 or problem.formats.w.scaled:
            raise SystemExit("--baseline gemms: expected --ranks 1, and BF16")
        self.problem = problem
        self._ids: Tensor | None = None  # that the rows were made of

    def _rows(self, call: Call) -> None:
        """Make the rows of a call's routes, sorted by expert; outside of what is timed, in its first call."""
        if self._ids is call.topk_ids:
            return
        p, ids = self.problem, call.topk_ids
        x, _ = call.rows
        experts, order = ids.flatten().long().sort(stable=True)
        counts = torch.bincount(experts, minlength=p.num_experts)
        self.ends = counts.cumsum(0).int()
        self.x, width = x[order // p.top_k], p.activation.planes * p.intermediate
        self.h, self.dgu = x.new_empty(len(order), p.intermediate), x.new_empty(len(order), width)
        self.dy = torch.empty_like(self.x)
        for drawn in (self.h, self.dgu, self.dy):
            drawn.normal_()
        self._ids = ids

    def forward(self, call: Call, keep: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return gemm2's rows [T*K, H] in place of y."""
        self._rows(call)
        grouped_mm(self.x, call.weights.w13.mT, self.ends)
        y_rows = grouped_mm(self.h, call.weights.w2.mT, self.ends)
        return y_rows, self.ends if keep else None

    def backward(self, call: Call, dy: Tensor, state: Tensor, wanted: Wanted) -> Gradients:
        """Return dx's rows and the weights' gradients."""
        self._rows(call)
        grouped_mm(self.dy, call.weights.w2, self.ends)
        dx_rows = grouped_mm(self.dgu, call.weights.w13, self.ends)
        dw13 = grouped_mm(self.dgu.T, self.x, self.ends)
        return Gradients(x=dx_rows, w13=dw13, w2=grouped_mm(self.dy.T, self.h, self.ends))


def register() -> None:
    """Let make_backend() know it."""
    functional.BACKENDS[NAME] = (__name__, "Gemms")
