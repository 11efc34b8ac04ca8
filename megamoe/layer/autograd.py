"""The layer as torch.library operators, so that torch.compile sees one opaque, differentiable call.

    megamoe::moe_forward(x, topk_ids, topk_weights, w13, w2, b13?, b2?, w13_scale?, w2_scale?,
                         num_tokens_device?, handle) -> y
    megamoe::moe_forward_train(<the same>, state_bytes) -> (y, state)
    megamoe::moe_forward_quantized(x, x_scale, <the same>) -> y

x is [..., H], topk_ids and topk_weights [..., K], all contiguous: flattened inside, so that y is never a view.
`handle` numbers an entry of a table of runtimes (backend, cache of quantized weights): operators take
no objects. It is a CPU tensor and not an int, so that equal layers share one compiled graph.
moe_forward_train is taken where gradients are recorded and the backend saves: `state` [state_bytes] uint8 is what its
backward pass reads besides the inputs. Behind other backends the backward pass recomputes, see backward.py.

Outside of torch.compile the autograd node is made without the dispatcher: 2026-11-22, CPU, a call with gradients took
19 us instead of 100 (tools/host_cost.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megamoe.core import transforms
from megamoe.core.errors import ArgumentError, MegaMoEError
from megamoe.core.planes import SUSPECT_BELOW, check_memory
from megamoe.formats.quantized import QuantizedRows
from megamoe.formats.weights import ExpertWeights
from megamoe.layer import main_grad
from megamoe.layer.backward import DIFFERENTIABLE, gradients, library
from megamoe.layer.delayed import Delayed
from megamoe.layer.runtime import Runtime, flat, runtime_of

__all__ = ["Runtime", "apply", "apply_quantized", "refuse_tangents", "runtime_of", "watched"]


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
    recorded: bool = False,
) -> Tensor:
    """Run the backend behind `handle`. recorded: gradients are; a backend that saves nothing for them is told."""
    runtime = runtime_of(handle)
    rows = flat(x), flat(topk_ids), flat(topk_weights)
    options: Any = {"recorded": True} if recorded and not runtime.state_bytes else {}
    with runtime.lock:
        weights = runtime.weights(ExpertWeights(w13, w2, b13, b2, w13_scale, w2_scale))
        y = runtime.backend.forward(*rows, weights, num_tokens_device, **options)
    return _like(y, x)


def moe_forward_train_op(
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
    state_bytes: int,
) -> tuple[Tensor, Tensor]:
    """Do the same, and return what backward needs besides the inputs."""
    runtime = runtime_of(handle)
    rows = flat(x), flat(topk_ids), flat(topk_weights)
    given = ExpertWeights(w13, w2, b13, b2, w13_scale, w2_scale)
    with runtime.lock:
        weights = runtime.weights(given, trains=True)
        y, state = runtime.backend.forward_train(*rows, weights, num_tokens_device)
    return _like(y, x), state


def moe_forward_quantized_op(
    x: Tensor,
    x_scale: Tensor,
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
    """Do the same for x in e4m3 with its scales; without gradients."""
    runtime = runtime_of(handle)
    rows = QuantizedRows(flat(x), flat(x_scale)), flat(topk_ids), flat(topk_weights)
    with runtime.lock:
        weights = runtime.weights(ExpertWeights(w13, w2, b13, b2, w13_scale, w2_scale))
        return runtime.backend.forward(*rows, weights, num_tokens_device).view(x.shape)


def _like(y: Tensor, x: Tensor) -> Tensor:
    """[T, H] -> the shape of x; FSDP2 takes no views."""
    return y if y.shape == x.shape else torch.ops.aten._unsafe_view(y, x.shape)


def _with_memory(op: Any) -> Any:
    """Return the operator as a compiled graph calls it, which does not look whether storage was freed."""
    names = tuple(inspect.signature(op).parameters)

    def call(*args: Any) -> Any:
        try:
            for name, t in zip(names, args, strict=False):  # defaults are left out
                if isinstance(t, Tensor) and t.data_ptr() < SUSPECT_BELOW:
                    check_memory(name, t)
        except ArgumentError:
            runtime_of(args[names.index("handle")]).refuse()
            raise
        return op(*args)

    return call


# By hand what torch.library.custom_op does: 2.3 us of 9.5 less a call (2026-11-22, CPU, no_grad).
for _name, _op in (
    ("moe_forward", moe_forward_op),
    ("moe_forward_train", moe_forward_train_op),
    ("moe_forward_quantized", moe_forward_quantized_op),
):
    library.define(
        _name + torch.library.infer_schema(_op, mutates_args=()),
        tags=(torch.Tag.pt2_compliant_tag,),
    )
    library.impl(_name, _with_memory(_op), "CompositeExplicitAutograd")


@torch.library.register_fake("megamoe::moe_forward")
def _(x: Tensor, *args: Any) -> Tensor:
    return torch.empty_like(x)


@torch.library.register_fake("megamoe::moe_forward_quantized")
def _(x: Tensor, *args: Any) -> Tensor:
    return torch.empty_like(x, dtype=torch.bfloat16)


@torch.library.register_fake("megamoe::moe_forward_train")
def _(x: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(args[-1], dtype=torch.uint8)


def refuse_op(x: Tensor, text: str, handle: Tensor) -> Tensor:
    """Stand for a call whose arguments were refused while it was traced: tell the other ranks, and raise."""
    runtime_of(handle).refuse()
    raise ArgumentError(text)


library.define("refuse" + torch.library.infer_schema(refuse_op, mutates_args=()))
library.impl("refuse", refuse_op, "CompositeExplicitAutograd")


@torch.library.register_fake("megamoe::refuse")
def _(x: Tensor, text: str, handle: Tensor) -> Tensor:
    return torch.empty_like(x, dtype=torch.bfloat16)


class _Call(torch.autograd.Function):
    """One call whose gradients are recorded.

    Arguments: those of moe_forward; state_bytes, 0: recompute; direct: nobody has to see the operators; ExpertWeights
    whose gradients are added to their main_grad, or None; ExpertWeights whose gradients wait, their tensors in place of
    those above, and where they wait, or None; Delayed.anchor, or None.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        *inputs, state_bytes, ctx.direct, ctx.adding, ctx.delaying, _ = args
        if ctx.delaying is not None:
            inputs[3:9] = ctx.delaying[1]
        if not ctx.direct:
            with torch._C._AutoDispatchBelowAutograd():
                result = _operator(inputs, state_bytes, True)
        elif state_bytes:
            result = moe_forward_train_op(*inputs, state_bytes)
        else:
            result = moe_forward_op(*inputs, True)
        ctx.handle = inputs[-1]
        # A zero gradient of the state would be as large as the state.
        ctx.set_materialize_grads(False)
        if state_bytes:
            ctx.mark_non_differentiable(result[1])
            ctx.save_for_backward(*inputs, result[1])
        else:
            ctx.save_for_backward(*inputs, None)
        return result

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        try:
            *inputs, handle, state = ctx.saved_tensors
        except MegaMoEError:  # a checkpoint's call, made again: the other ranks have been told
            raise
        except RuntimeError:  # changed in place, or freed; the other ranks would wait
            if ctx.direct:
                runtime_of(ctx.handle).refuse()
            raise
        wanted = ctx.needs_input_grad  # made anew at each look
        needs = [wanted[i] for i in DIFFERENTIABLE]
        if ctx.delaying is not None:
            anchor = ctx.next_functions[-1][0]
            asked = torch._C._will_engine_execute_node(anchor)  # not by grad(loss, inputs=[x])
            waits = ctx.delaying if asked else None
            grads = _delayed(waits, dy, inputs, handle, state, needs)
        elif ctx.adding is not None:
            for index in (2, 3):  # grad(loss, inputs=[x]) adds nothing
                needs[index] = needs[index] and _asked(ctx.next_functions[index + 1][0])
            grads = _added(ctx.adding, dy, inputs, handle, state, needs)
        elif not ctx.direct or watched() or torch.is_grad_enabled():
            dy = torch.zeros_like(inputs[0]) if dy is None else dy.contiguous()
            made = torch.ops.megamoe.moe_backward(dy, *inputs, handle, needs, state)
            grads = [grad if need else None for grad, need in zip(made, needs, strict=True)]
        else:
            grads = gradients(runtime_of(handle), dy, inputs, state, needs)
        dx, d_topk_weights, *of_weights = grads
        return dx, None, d_topk_weights, *of_weights, *[None] * 9


def _asked(node: Any) -> bool:
    """Whether this backward pass goes on to the node of a weight."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # autograd.grad() asks for the weight itself
        return True


def _added(
    weights: ExpertWeights,
    dy: Tensor | None,
    inputs: Sequence[Any],
    handle: Tensor,
    state: Tensor | None,
    needs: list[bool],
) -> list[Tensor | None]:
    """Return the gradients; those of w13 and w2 are added to the main_grad of `weights`."""
    runtime = runtime_of(handle)
    try:
        if torch.is_grad_enabled():
            raise ArgumentError("create_graph", True, "False with accumulate_into_main_grad")
        into = main_grad.targets(weights, needs[2:4])
    except ArgumentError:
        runtime.refuse()
        raise
    grads = gradients(runtime, dy, inputs, state, needs, into)
    for index, name in ((2, "w13"), (3, "w2")):
        if name in into:
            grads[index] = main_grad.added(getattr(weights, name))
    return grads


def _delayed(
    waits: tuple[ExpertWeights, Any, Delayed] | None,
    dy: Tensor | None,
    inputs: Sequence[Any],
    handle: Tensor,
    state: Tensor | None,
    needs: list[bool],
) -> list[Tensor | None]:
    """Return the gradients of x and topk_weights; those of weights wait, if they are asked for."""
    runtime = runtime_of(handle)
    if torch.is_grad_enabled():
        runtime.refuse()
        raise ArgumentError("create_graph", True, "False with delay_wgrad")
    grads: list[Tensor | None] = [None] * 6
    if any(needs):
        grads = gradients(runtime, dy, inputs, state, needs)
    if waits is not None:
        weights, _, delayed = waits
        delayed.add(weights, dy, inputs, state)
    return grads


def _operator(inputs: Sequence[Tensor | None], state_bytes: int, recorded: bool = False) -> Any:
    if state_bytes:
        return torch.ops.megamoe.moe_forward_train(*inputs, state_bytes)
    return torch.ops.megamoe.moe_forward(*inputs, recorded)


def _autograd(inputs: Sequence[Tensor | None], state_bytes: int) -> Any:
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs):
        return _Call.apply(*inputs, state_bytes, False, None, None, None)
    with torch._C._AutoDispatchBelowAutograd():
        return _operator(inputs, state_bytes)


library.impl("moe_forward", lambda *args: _autograd(args[:11], 0), "Autograd")
library.impl("moe_forward_train", lambda *args: _autograd(args[:-1], args[-1]), "Autograd")


def watched() -> bool:
    """Whether a mode or a transform has to see the operators."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or transforms.functional()
        or transforms.forward_mode()
    )


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
    if transforms.has_tangent(tensors):
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
    state_bytes: int = 0,
    direct: bool = False,
    adding: bool = False,
    delayed: Delayed | None = None,
) -> Tensor:
    """Call the layer; arguments as in Layer.__call__, already checked, contiguous.

    state_bytes: that the backend's training forward saves; 0: the backward pass, if any, recomputes.
    direct: gradients are recorded, all tensors are plain, and nobody has to see the operators.
    adding: gradients are recorded, and those of weights are added to their main_grad.
    delayed: gradients are recorded, and those of weights wait there.
    """
    w = weights
    of_weights = (w.w13, w.w2, w.b13, w.b2, w.w13_scale, w.w2_scale)
    inputs = (x, topk_ids, topk_weights, *of_weights, num_tokens_device, handle)
    if delayed is not None:
        # The weights are no inputs of the node: autograd would take it that their gradients are zero.
        inputs = (x, topk_ids, topk_weights, *[None] * 6, num_tokens_device, handle)
        waits = (weights, of_weights, delayed), delayed.anchor
        result = _Call.apply(*inputs, state_bytes, direct, None, *waits)
    elif direct or adding:
        adds = weights if adding else None
        result = _Call.apply(*inputs, state_bytes, direct, adds, None, None)
    else:
        result = _operator(inputs, state_bytes)
    y: Tensor = result[0] if state_bytes else result
    return y


def apply_quantized(
    x_scale: Tensor,
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    weights: ExpertWeights,
    handle: Tensor,
    num_tokens_device: Tensor | None = None,
) -> Tensor:
    """Call the layer for x in e4m3, whose gradients are not recorded; arguments as in apply()."""
    w = weights
    of_weights = (w.w13, w.w2, w.b13, w.b2, w.w13_scale, w.w2_scale)
    rows = x, x_scale, topk_ids, topk_weights
    y: Tensor = torch.ops.megamoe.moe_forward_quantized(
        *rows, *of_weights, num_tokens_device, handle
    )
    return y
