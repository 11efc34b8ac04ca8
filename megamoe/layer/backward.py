"""The layer's gradients: by the backend from the state that its forward saved, or recomputed by staged mathematics.

    megamoe::moe_backward(dy, x, topk_ids, topk_weights, w13, w2, b13?, b2?, w13_scale?, w2_scale?,
                          num_tokens_device?, handle, needs, state?) -> (dx, d_topk_weights, dw13, dw2, db13, db2)

Both are collective, so every rank must need the same gradients; one that is not needed comes back empty. What is
recomputed uses the quantized values where the forward used them, and goes straight through the rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megamoe.backends.staged import compute_dtype, moe, without_rows_behind
from megamoe.core.config import Problem
from megamoe.core.errors import ArgumentError, MegaMoEError
from megamoe.core.planes import check_memory
from megamoe.formats.weights import ExpertWeights, check_tensor
from megamoe.group.order import BACKWARD
from megamoe.layer.runtime import Runtime, flat, runtime_of

# x, topk_weights, w13, w2, b13, b2 among the arguments of the operators
DIFFERENTIABLE = (0, 2, 3, 4, 5, 6)
ALIGNMENT = 16  # bytes, of what the kernel reads
NAMES = (
    *("x", "topk_ids", "topk_weights", "weights.w13", "weights.w2", "weights.b13", "weights.b2"),
    *("weights.w13_scale", "weights.w2_scale", "num_tokens_device"),
)
Inputs = Sequence[Any]  # those of NAMES


def gradients(
    runtime: Runtime,
    dy: Tensor | None,
    inputs: Inputs,
    state: Tensor | None,
    needs: list[bool],
    into: Mapping[str, Tensor] | None = None,
    only_weights: bool = False,
) -> list[Tensor | None]:
    """Return the gradients of DIFFERENTIABLE inputs, in their dtypes, shapes and strides. Collective.

    dy: like x; None is zero. state: of this call's training forward, never changed; None: recompute.
    into: "w13", "w2" -> a tensor like the weight, fp32 or bf16, that the gradient is added to; None in the list.
    only_weights: no rank needs gradients of x or topk_weights in this pass.
    Raises ArgumentError, on all ranks, for a dy that is unlike y.
    """
    x, _, topk_weights, w13, w2, b13, b2, *_ = inputs
    try:
        dy = _checked(dy, x)
        _check_there(runtime.problem, w13, w2)
        for name, t in zip(NAMES, inputs, strict=True):
            if t is not None:
                check_memory(name, t)
        if state is not None:
            check_tensor("state", state, (runtime.state_bytes,), torch.uint8, x.device)
    except ArgumentError:
        runtime.refuse()
        raise
    leaves = (x, topk_weights, w13, w2, b13, b2)

    def make() -> list[Tensor | None]:
        return _made(runtime, dy, inputs, state, needs, into, only_weights)

    with runtime.lock:
        if runtime.replicas is not None and any(needs[2:]):
            found = runtime.replicas.summed(make, needs[2:], into or {}, runtime.mark, x.device)
        else:
            found = make()
    made = [
        _laid_out(grad, leaf) if need and grad is not None and leaf is not None else None
        for grad, leaf, need in zip(found, leaves, needs, strict=True)
    ]
    if runtime.mean_over != 1:
        made[2:] = [grad if grad is None else grad / runtime.mean_over for grad in made[2:]]
    return made


def _made(
    runtime: Runtime,
    dy: Tensor,
    inputs: Inputs,
    state: Tensor | None,
    needs: list[bool],
    into: Mapping[str, Tensor] | None,
    only_weights: bool,
) -> list[Tensor | None]:
    """Make the gradients of this rank's slots, see gradients()."""
    x, topk_ids, topk_weights, *of_weights, num_tokens_device = inputs
    given = ExpertWeights(*of_weights)
    if state is None:
        call = flat(x), flat(topk_ids), flat(topk_weights), given, num_tokens_device
        found = _recompute(runtime, flat(dy), *call, needs)
    else:
        turned = runtime.turned(given)
        found = runtime.backend.backward(
            flat(dy), flat(x), flat(topk_ids), given, state, needs,
            num_tokens_device=num_tokens_device, **({"into": into} if into else {}),
            **({"only_weights": True} if only_weights else {}),
            **({"turned": turned} if turned else {}),
        )  # fmt: skip
    if into and state is None:
        for index, name in ((2, "w13"), (3, "w2")):
            if name in into:
                into[name].add_(found[index].reshape(into[name].shape))  # type: ignore[union-attr]
                found[index] = None
    return found


def _checked(dy: Tensor | None, x: Tensor) -> Tensor:
    """Return dy as the kernel reads it."""
    if dy is None:
        return torch.zeros_like(x)
    if isinstance(dy, Tensor) and torch._C._functorch.is_legacy_batchedtensor(dy):
        raise ArgumentError("is_grads_batched", True, "False: one gradient of y in each pass")
    if isinstance(dy, Tensor) and dy.layout != torch.strided:
        raise ArgumentError("dy.layout", dy.layout, "torch.strided: a dense gradient of y")
    if isinstance(dy, Tensor) and not dy.is_contiguous():
        dy = dy.contiguous()
    if isinstance(dy, Tensor) and dy.is_neg():
        dy = dy.resolve_neg()
    check_tensor("dy", dy, tuple(x.shape), torch.bfloat16, x.device)
    return (
        dy.clone() if dy.data_ptr() % ALIGNMENT else dy
    )  # as a slice of a larger gradient may lie


def _check_there(problem: Problem, w13: Tensor, w2: Tensor) -> None:
    """Refuse weights whose memory was given away behind the call, as frameworks do that shard by `p.data = ...`."""
    matrix = problem.num_local_experts(problem.rank) * problem.intermediate * problem.hidden
    planes = problem.activation.planes
    for name, w, count in (("w13", w13, planes * matrix), ("w2", w2, matrix)):
        if w.numel() != count:
            expected = f"{count} elements, as in the forward pass: its data was replaced behind it"
            raise ArgumentError(f"weights.{name}.shape", list(w.shape), expected)


def _laid_out(grad: Tensor, master: Tensor) -> Tensor:
    """Return the gradient in the master's dtype, shape and, where its memory is dense, strides."""
    if grad.shape != master.shape or grad.dtype != master.dtype:
        grad = grad.to(master.dtype).reshape(master.shape)
    if grad.stride() == master.stride():
        return grad
    if grad.stride() == torch.empty_like(master, device="meta").stride():
        return grad
    return torch.empty_like(master).copy_(grad)


@contextmanager
def _recording_gradients() -> Iterator[None]:
    """Record gradients inside an operator, where torch has switched the autograd keys off."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradFunctionality)
    keys = keys | torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
    included = torch._C._dispatch_tls_local_include_set()
    excluded = torch._C._dispatch_tls_local_exclude_set() - keys
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield


def _recompute(
    runtime: Runtime,
    dy: Tensor,
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    given: ExpertWeights,
    num_tokens_device: Tensor | None,
    needs: list[bool],
) -> list[Tensor | None]:
    """Run the layer by staged mathematics on the saved inputs, and differentiate it."""
    problem = runtime.problem
    dense = runtime.weights(given).dense(problem, compute_dtype(x.device))
    if num_tokens_device is not None:
        topk_ids = without_rows_behind(topk_ids, num_tokens_device)
    sources = (x, topk_weights, dense.w13, dense.w2, dense.b13, dense.b2)
    leaves = [
        None if source is None else source.detach().requires_grad_(need)
        for source, need in zip(sources, needs, strict=True)
    ]
    wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    with _recording_gradients():
        weights = ExpertWeights(*leaves[2:])  # type: ignore[arg-type]
        mark = runtime.mark.ints(BACKWARD)
        y, _ = moe(problem, runtime.group, leaves[0], topk_ids, leaves[1], weights, mark)  # type: ignore[arg-type]
        with torch.autocast(x.device.type, enabled=False):  # of a caller, whose types these are not
            grads = torch.autograd.grad(y, wanted, dy, materialize_grads=True)
    found = iter(grads)
    return [
        next(found) if leaf is not None and leaf.requires_grad else None  # in the order of `wanted`
        for leaf in leaves
    ]


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
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return gradients(); `needs`: a flag per output."""
    inputs = x, topk_ids, topk_weights, w13, w2, b13, b2, w13_scale, w2_scale, num_tokens_device
    found = gradients(runtime_of(handle), dy, inputs, state, needs)
    return tuple(x.new_empty(0) if grad is None else grad for grad in found)  # type: ignore[return-value]


library = torch.library.Library("megamoe", "FRAGMENT")
library.define(
    "moe_backward" + torch.library.infer_schema(moe_backward_op, mutates_args=()),
    tags=(torch.Tag.pt2_compliant_tag,),
)
library.impl("moe_backward", moe_backward_op, "CompositeExplicitAutograd")


@torch.library.register_fake("megamoe::moe_backward")
def _(dy: Tensor, x: Tensor, topk_ids: Tensor, *args: Any) -> tuple[Tensor, ...]:
    topk_weights, w13, w2, b13, b2, _, _, _, _, needs, *_ = args
    masters = (x, topk_weights, w13, w2, b13, b2)
    return tuple(
        torch.empty_like(master) if need and master is not None else x.new_empty(0)
        for master, need in zip(masters, needs, strict=True)
    )


class _Once(torch.autograd.Function):
    """Gradients, of which there are none: where autograd records the backward pass (create_graph=True)."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.megamoe.moe_backward(*args)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise MegaMoEError(
            "a gradient of a megamoe layer was differentiated again, expected first derivatives only: the layer has "
            "no second ones"
        )


def _autograd(*args: Any) -> Any:
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
        return _Once.apply(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.megamoe.moe_backward(*args)


library.impl("moe_backward", _autograd, "Autograd")
