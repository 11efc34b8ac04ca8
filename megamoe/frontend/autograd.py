"""The layer as torch.library operators, so that torch.compile sees one opaque, differentiable call.

    megamoe::moe_forward(x, topk_ids, topk_weights, w13, w2, b13?, b2?, w13_scale?, w2_scale?,
                         num_tokens_device?, handle) -> y
    megamoe::moe_backward(dy, <the same>, needs) -> (dx, d_topk_weights, dw13, dw2, db13, db2)

x is [..., H], topk_ids and topk_weights [..., K], all contiguous: flattened inside, so that y is never a view.
`handle` numbers an entry of a table of runtimes (backend, cache of quantized weights): operators take
no objects. It is a CPU tensor and not an int, so that equal layers share one compiled graph.
The backward pass recomputes: it runs the staged mathematics on the saved inputs, with the
quantized values where the forward used them and straight through the rounding. It is collective, so
every rank must need the same gradients; a gradient that is not needed comes back empty.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from megamoe.backends.order import BACKWARD, Mark
from megamoe.backends.staged import compute_dtype, moe, without_rows_behind
from megamoe.config import Problem
from megamoe.errors import ArgumentError, MegaMoEError
from megamoe.formats.cache import QuantizedCache
from megamoe.formats.weights import ExpertWeights
from megamoe.frontend.functional import Backend


@dataclass(eq=False)
class Runtime:
    """What a call needs besides tensors. The table holds it weakly: its layer keeps it alive."""

    problem: Problem
    group: Any
    backend: Backend
    cache: QuantizedCache = field(default_factory=QuantizedCache)
    mark: Mark = field(init=False)  # of its backward calls
    handle: Tensor = field(init=False)  # [] int64 on the CPU

    def __post_init__(self) -> None:
        number = next(_numbers)
        self.handle = torch.tensor(number, dtype=torch.int64, device="cpu")
        self.mark = getattr(self.backend, "mark", None) or Mark.make(self.problem, self.group)
        _runtimes[number] = self

    def weights(self, given: ExpertWeights) -> ExpertWeights:
        """Return what the backend takes: fp8 masters quantized once per version."""
        if self.problem.formats.w.scaled and given.w13_scale is None:
            return self.cache.weights(self.problem, given)
        return given


_numbers = itertools.count(1)
_runtimes: weakref.WeakValueDictionary[int, Runtime] = weakref.WeakValueDictionary()


def runtime_of(handle: Tensor) -> Runtime:
    """Return the runtime of a handle."""
    runtime = _runtimes.get(int(handle))
    if runtime is None:
        raise MegaMoEError(f"the layer of handle {int(handle)} is closed or was deleted")
    return runtime


def moe_forward_op(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    b13: Tensor | None,
    b2: Tensor | None,
    w13_scale: Tensor | None,
    w2_scale: Tensor | None,
    num_tokens_device: Tensor | None,
    handle: Tensor,
) -> Tensor:
    """Run the backend behind `handle`."""
    runtime = runtime_of(handle)
    weights = runtime.weights(ExpertWeights(w13, w2, b13, b2, w13_scale, w2_scale))
    rows = _flat(x), _flat(topk_ids), _flat(topk_weights)
    y = runtime.backend.forward(*rows, weights, num_tokens_device)
    return torch.ops.aten._unsafe_view(y, x.shape)  # FSDP2 takes no views


def _flat(tensor: Tensor) -> Tensor:
    return tensor.view(-1, tensor.shape[-1])


# By hand what torch.library.custom_op does: 2.3 us of 9.5 less a call (2026-11-22, CPU, no_grad).
_library = torch.library.Library("megamoe", "FRAGMENT")
_library.define(
    "moe_forward" + torch.library.infer_schema(moe_forward_op, mutates_args=()),
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.impl("moe_forward", moe_forward_op, "CompositeExplicitAutograd")


@torch.library.register_fake("megamoe::moe_forward")
def _(x: Tensor, *args: Any) -> Tensor:
    return torch.empty_like(x)


@contextmanager
def _recording_gradients() -> Iterator[None]:
    """Record gradients inside an operator, where torch has switched the autograd keys off."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradFunctionality)
    keys = keys | torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
    included = torch._C._dispatch_tls_local_include_set()
    excluded = torch._C._dispatch_tls_local_exclude_set() - keys
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield


@torch.library.custom_op("megamoe::moe_backward", mutates_args=())
def moe_backward_op(
    dy: Tensor,
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    b13: Tensor | None,
    b2: Tensor | None,
    w13_scale: Tensor | None,
    w2_scale: Tensor | None,
    num_tokens_device: Tensor | None,
    handle: Tensor,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Recompute the layer by staged mathematics, differentiate it; `needs`: a flag per output."""
    runtime = runtime_of(handle)
    problem = runtime.problem
    given = runtime.weights(ExpertWeights(w13, w2, b13, b2, w13_scale, w2_scale))
    dense = given.dense(problem, compute_dtype(x.device))
    topk_ids = _flat(topk_ids)
    if num_tokens_device is not None:
        topk_ids = without_rows_behind(topk_ids, num_tokens_device)
    sources = (_flat(x), _flat(topk_weights), dense.w13, dense.w2, dense.b13, dense.b2)
    leaves = [
        None if source is None else source.detach().requires_grad_(need)
        for source, need in zip(sources, needs, strict=True)
    ]
    wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    with _recording_gradients():
        weights = ExpertWeights(*leaves[2:])
        mark = runtime.mark.ints(BACKWARD)
        y, _ = moe(problem, runtime.group, leaves[0], topk_ids, leaves[1], weights, mark)
        found = iter(torch.autograd.grad(y, wanted, _flat(dy), materialize_grads=True))
    masters = (x, topk_weights, w13, w2, b13, b2)
    grads = []
    for leaf, master in zip(leaves, masters, strict=True):
        if leaf is not None and leaf.requires_grad:
            grads.append(_laid_out(next(found), master))
        else:
            grads.append(x.new_empty(0))
    return tuple(grads)  # type: ignore[return-value]


def _laid_out(grad: Tensor, master: Tensor) -> Tensor:
    """Return the gradient in the master's dtype, shape and, where its memory is dense, strides."""
    grad = grad.to(master.dtype).reshape(master.shape)
    if grad.stride() == torch.empty_like(master, device="meta").stride():
        return grad
    return torch.empty_like(master).copy_(grad)


@moe_backward_op.register_fake
def _(dy: Tensor, x: Tensor, topk_ids: Tensor, *args: Any) -> tuple[Tensor, ...]:
    topk_weights, w13, w2, b13, b2, *_, needs = args
    masters = (x, topk_weights, w13, w2, b13, b2)
    return tuple(
        torch.empty_like(master) if need and master is not None else x.new_empty(0)
        for master, need in zip(masters, needs, strict=True)
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    differentiable = (0, 2, 3, 4, 5, 6)  # x, topk_weights, w13, w2, b13, b2
    needs = [bool(ctx.needs_input_grad[i]) for i in differentiable]
    grads = torch.ops.megamoe.moe_backward(dy.contiguous(), *ctx.saved_tensors, needs)
    result: list[Tensor | None] = [None] * 11
    for i, need, grad in zip(differentiable, needs, grads, strict=True):
        result[i] = grad if need else None
    return tuple(result)


torch.library.register_autograd("megamoe::moe_forward", _backward, setup_context=_save)


def refuse_tangents(tensors: Sequence[Tensor | None]) -> None:
    """Raise ArgumentError for forward-mode derivatives: the operators would drop them, that is, return zeros.

    So for torch.func's reverse mode, which torch refuses in other words. vmap is right, one call after the other.
    """
    if not torch.compiler.is_compiling():
        transform = torch._C._functorch.peek_interpreter_stack()
        if transform is not None and transform.key() == torch._C._functorch.TransformType.Grad:
            raise ArgumentError(
                "the layer was called inside torch.func.grad, vjp or jacrev, expected torch.autograd: "
                "its operators have no functional transform"
            )
    if forward_ad._current_level < 0:
        return
    for tensor in tensors:
        if tensor is None or not tensor.is_floating_point():
            continue
        if forward_ad.unpack_dual(tensor).tangent is not None:
            raise ArgumentError(
                "a tensor with a forward-mode tangent (torch.func.jvp, jacfwd, torch.autograd.forward_ad) was "
                "given, expected reverse mode: the layer has no forward-mode derivative"
            )


def apply(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    weights: ExpertWeights,
    handle: Tensor,
    num_tokens_device: Tensor | None = None,
) -> Tensor:
    """Call the layer's operator; arguments as in Layer.__call__, already checked, contiguous."""
    w = weights
    optional = w.b13, w.b2, w.w13_scale, w.w2_scale, num_tokens_device
    y: Tensor = torch.ops.megamoe.moe_forward(
        x, topk_ids, topk_weights, w.w13, w.w2, *optional, handle
    )
    return y
