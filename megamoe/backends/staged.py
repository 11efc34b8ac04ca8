"""Implement backend="staged", the portable one: all_to_all of rows, grouped matmuls, all_to_all back.

Every operation is differentiable. A backward pass runs the call again and uses torch's autograd. Numerics: h, y_rows
and y are rounded to bf16 as in the kernel. y is a sum of rows instead of partials, so partials are not rounded, and on
CUDA the grouped matmul rounds gate_up to bf16 once more.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megamoe.backends.call import Backend, Call, Gradients, GradRequest
from megamoe.backends.rail import Crossing, all_to_all, exchange_counts
from megamoe.backends.statistics import Statistics
from megamoe.core.config import Problem
from megamoe.core.planes import rows_of
from megamoe.formats.quantization import Codec, codec
from megamoe.formats.quantized import QuantizedRows
from megamoe.formats.weights import ExpertWeights
from megamoe.group.group import Group
from megamoe.group.order import BACKWARD, GRAD_OF_ROWS, GRAD_OF_X, RECORDED


class _RowsOfTokens(torch.autograd.Function):
    """One row for each route; a token's gradient sums those of its rows in the order of k.

    Indexing would sum them with atomics in fp32 on the CPU, and index_select on CUDA: other bits in every call.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, top_k: int) -> Tensor:
        """x: [T, H], order: [M] indices t * K + k, no two equal -> [M, H]."""
        ctx.save_for_backward(order)
        ctx.shape = x.shape[0], top_k, x.shape[1]
        return x[order // top_k]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        tokens, top_k, hidden = ctx.shape
        of_routes = grad.new_zeros(tokens * top_k, hidden).index_copy(0, order, grad)
        summed = of_routes.view(ctx.shape).sum(1, dtype=torch.float32)
        return summed.to(grad.dtype), None, None


class _StraightThrough(torch.autograd.Function):
    """Value of the quantized rows, gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, formulas: Codec) -> Tensor:
        return formulas.dequantize(*formulas.quantize(x)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class StagedBackend(Backend):
    """Hold the problem and the group; one forward is two exchanges and two grouped matmuls.

    A backward pass computes the call again: the state has only the call's number, [1] int32, of those recorded.
    """

    state_bytes = 4
    recomputes = True

    def __init__(self, problem: Problem, group: Any = None) -> None:
        self.problem, self.group = problem, Group.of(group)
        self.mark = self.group.mark(problem)
        self._device = torch.device("cpu")
        self._num_recorded = 0

    def prepare(self, weights: ExpertWeights) -> None:
        """Prepare only abort()."""
        self._device = weights.w13.device

    def abort(self, error: Exception) -> None:
        """Take part in the exchange of the others' call, with an error. Collective."""
        self.group.fail(self.mark.ints(), error, self._device)

    def forward(self, call: Call, keep: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return y [T, H] bf16 and, to be kept, the state; rows from num_tokens_device on are zero. Collective."""
        call.weights.validate(self.problem, call.x.device)
        dense = call.weights.dense(self.problem, compute_dtype(call.x.device))
        given = call._replace(topk_ids=call.computed_ids(), weights=dense)
        # Both modes may be on; then nothing is recorded.
        recorded = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        autocast = torch.autocast(call.x.device.type, enabled=False)
        with torch.set_grad_enabled(recorded), autocast:
            y, counts = moe(self.problem, self.group, given, self.mark.ints(RECORDED * keep))
        self._statistics = Statistics.without_pool(counts)
        state = None
        if keep:
            self._num_recorded += 1
            number = torch.full((1,), self._num_recorded, dtype=torch.int32, device=y.device)
            state = number.view(torch.uint8)
        return y if call.out is None else call.out.copy_(y), state

    def backward(self, call: Call, dy: Tensor, state: Tensor, wanted: GradRequest) -> Gradients:
        """Return the gradients. Collective. weights: as the forward pass had them, quantized ones too.

        Raises RankMismatch where ranks come with states of different calls.
        """
        dense = call.weights.dense(self.problem, compute_dtype(dy.device))
        sources = {"x": call.x, "topk_weights": call.topk_weights, **vars(dense)}
        leaves: dict[str, Any] = {
            name: None if sources[name] is None else sources[name].detach().requires_grad_(need)
            for name, need in wanted.needs._asdict().items()
        }
        asked = {n: leaf for n, leaf in leaves.items() if leaf is not None and leaf.requires_grad}
        # Autocast is the caller's, whose types these are not.
        with recording_gradients(), torch.autocast(dy.device.type, enabled=False):
            x, topk_weights = leaves.pop("x"), leaves.pop("topk_weights")
            again = Call(x, call.computed_ids(), topk_weights, ExpertWeights(**leaves))
            mark, number = self.mark.ints(BACKWARD), state.view(torch.int32)
            y, _ = moe(self.problem, self.group, again, mark, number)
            grads = torch.autograd.grad(y, list(asked.values()), dy, materialize_grads=True)
        found = Gradients(**dict(zip(asked, grads, strict=True)))
        for name, into in wanted.into.items():
            into.add_(getattr(found, name).reshape(into.shape))
        return found._replace(**dict.fromkeys(wanted.into))


def compute_dtype(device: torch.device) -> torch.dtype:
    """Return the type of dequantized values: fp32 on the CPU, bf16 for tensor cores."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


@contextmanager
def recording_gradients() -> Iterator[None]:
    """Record gradients inside an operator, where torch has switched the autograd keys off."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradFunctionality)
    keys = keys | torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
    included = torch._C._dispatch_tls_local_include_set()
    excluded = torch._C._dispatch_tls_local_exclude_set() - keys
    guard = torch._C._ForceDispatchKeyGuard(included, excluded)
    with guard, torch.inference_mode(False), torch.enable_grad():
        yield


def moe(
    problem: Problem, group: Group, call: Call, mark: list[int], number: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return y [T, H] in x's dtype (bf16 where x is quantized), and the rows of each local expert, [L] int64.

    call: weights without scales; of num_tokens_device and `out` it knows nothing. y is differentiable in x,
    topk_weights and all weights. The caller turns autocast off.
    mark: Mark.ints() of the layer and its call. number: [1] int32, of the call that a backward pass computes again. All
    ranks must agree on both, and on whether x and weights need gradients, since the backward pass is collective too:
    RankMismatch otherwise.
    """
    x, topk_ids, topk_weights, dense, *_ = call
    tokens, top_k = topk_ids.shape
    experts = problem.num_experts

    # route: one row per valid (token, k), sorted by expert, hence by rank
    flat = topk_ids.reshape(-1).long()
    valid = (flat >= 0) & (flat < experts)
    order = torch.argsort(torch.where(valid, flat, experts), stable=True)
    order = order[: int(valid.sum())]
    rows = _RowsOfTokens.apply(_source(problem, x), order, top_k)
    counts = torch.bincount(flat[order], minlength=experts)
    if group.size > 1:
        marked = [mark[0] | _gradients(rows, dense), mark[1]]
        parts = counts.split([problem.num_local_experts(rank) for rank in range(group.size)])
        table, found = exchange_counts(group, marked, parts, number)
        send = torch.stack([part.sum() for part in parts]).tolist()
        receive, received = found.sum(1).tolist(), table.long().flatten()
        exchange = all_to_all(group.process_group)
        rows = Crossing.apply(rows, send, receive, exchange)
    else:
        received = counts

    # by expert, source ranks in order
    local = problem.num_local_experts(problem.rank)
    expert = torch.arange(local, device=x.device).repeat(problem.ep_size)
    by_expert = torch.argsort(expert.repeat_interleave(received.flatten()), stable=True)
    sizes = received.reshape(problem.ep_size, local).sum(0)
    y_rows = _experts(problem, rows[by_expert], sizes, dense)

    # the way back
    y_sent = torch.empty_like(y_rows).index_copy(0, by_expert, y_rows)
    y_sorted = y_sent
    if group.size > 1:
        y_sorted = Crossing.apply(y_sent, receive, send, exchange)
    y_routes = y_sorted.new_zeros(tokens * top_k, problem.hidden).index_copy(0, order, y_sorted)

    # combine: weights in fp32; those of dropped routes may be anything, even NaN
    scores = torch.where(valid.view_as(topk_ids), topk_weights.float(), 0.0)
    y = torch.zeros(tokens, problem.hidden, dtype=torch.float32, device=x.device)
    for k, y_k in enumerate(y_routes.view(tokens, top_k, problem.hidden).unbind(1)):
        y = torch.addcmul(y, scores[:, k : k + 1], y_k.float())
    return y.to(x.dtype if isinstance(x, Tensor) else torch.bfloat16), sizes


def _source(problem: Problem, x: Tensor | QuantizedRows) -> Tensor:
    """Return x as gemm1 multiplies it: its values behind quantization, where the precision has one."""
    formulas, dtype = codec(problem.formats.x), compute_dtype(x.device)
    if formulas is None:
        assert isinstance(x, Tensor)
        return x
    if isinstance(x, QuantizedRows):
        return formulas.dequantize(*x).to(dtype)
    made: Tensor = _StraightThrough.apply(x.to(dtype), formulas)
    return made


def _gradients(rows: Tensor, dense: ExpertWeights) -> int:
    """Return which exchanges will have a backward pass, as bits of the mark."""
    if not torch.is_grad_enabled():  # also inside the forward operator, whose backward recomputes
        return 0
    of_x = rows.requires_grad
    of_rows = of_x or any(t.requires_grad for t in dense.named().values())
    return GRAD_OF_X * of_x | GRAD_OF_ROWS * of_rows


def _experts(problem: Problem, rows: Tensor, sizes: Tensor, dense: ExpertWeights) -> Tensor:
    """rows: [M, H] sorted by local expert, sizes: [L] -> y_rows [M, H] bf16."""
    if rows.shape[0] == 0:
        # No expert runs. Tie all inputs in, with no elements, so that backward meets the other ranks in both exchanges.
        ties = [t[:0].float().sum() for t in dense.named().values()]
        return (rows + torch.stack(ties).sum()).to(torch.bfloat16)
    grouped = rows.device.type == "cuda" and rows.dtype == dense.w13.dtype == torch.bfloat16
    matmul = _grouped_matmul if grouped else _matmul_by_expert
    gate_up = matmul(rows, dense.w13, dense.b13, sizes)
    h = problem.activation(gate_up)
    h_codec = codec(problem.formats.h)
    if h_codec is not None:
        h = _StraightThrough.apply(h, h_codec)
    if grouped or h_codec is None:
        h = h.to(rows.dtype)
    return matmul(h, dense.w2, dense.b2, sizes).to(torch.bfloat16)


def _grouped_matmul(rows: Tensor, w: Tensor, bias: Tensor | None, sizes: Tensor) -> Tensor:
    """rows: [M, K], w: [L, N, K], bias: [L, N], sizes: [L] -> [M, N] bf16, or fp32 with a bias.

    w and bias may be split into planes, [L, P, I, K] and [L, P, I]; N is P*I then.
    """
    ends = sizes.cumsum(0).to(torch.int32)
    parts = w.unbind(1) if w.dim() == 4 else (w,)
    products = [torch._grouped_mm(rows, part.transpose(-2, -1), offs=ends) for part in parts]
    out = torch.cat(products, dim=1) if len(products) > 1 else products[0]
    if bias is None:
        return out
    # Indexed, since the backward of repeat_interleave adds with atomics on CUDA, that of an index sorts.
    expert = torch.arange(sizes.numel(), device=rows.device).repeat_interleave(sizes)
    return out.float() + bias.flatten(1)[expert]


def _matmul_by_expert(rows: Tensor, w: Tensor, bias: Tensor | None, sizes: Tensor) -> Tensor:
    """Do what _grouped_matmul does, in fp32, one expert after the other."""
    parts = []
    for expert, part in enumerate(rows.split(sizes.tolist())):
        if part.shape[0] == 0:
            continue
        product = part.float() @ rows_of(w[expert]).float().T
        parts.append(product if bias is None else product + bias[expert].flatten().float())
    return torch.cat(parts)
