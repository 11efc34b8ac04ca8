"""Record gradients: the layer's autograd node, and where the gradients of weights go.

Outside of torch.compile the node is created without the dispatcher: a call with gradients took 19 us instead of 100
(2026-11-22, CPU, tools/host_cost.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megamoe.backends.call import Gradients, GradRequest, Needs
from megamoe.core import transforms
from megamoe.core.errors import ArgumentError
from megamoe.core.transforms import watched
from megamoe.formats.weights import ExpertWeights
from megamoe.layer import main_grad
from megamoe.layer.backward import Pass, gradients, known_of
from megamoe.layer.delayed import Delayed, asked_of
from megamoe.layer.inputs import Inputs
from megamoe.layer.operators import forward, library
from megamoe.layer.runtime import Runtime, runtime_of

NO_WEIGHTS: dict[str, Any] = dict.fromkeys(ExpertWeights.__dataclass_fields__)


class RecordOptions(NamedTuple):
    """Say how to record a call.

    state_bytes: size of the state that the backend saves.
    weights: as the caller passed them. adding: True: add gradients of w13 and w2 to their main_grad.
    delayed: where weight gradients wait.
    known: as Call.known. Then all tensors are plain, and nothing observes the operators.
    """

    handle: Tensor
    state_bytes: int
    weights: ExpertWeights | None = None
    adding: bool = False
    delayed: Delayed | None = None
    known: Any = None


class _Call(torch.autograd.Function):
    """Record one call for autograd. Arguments: RecordOptions; Delayed.anchor, or None; Inputs."""

    @staticmethod
    def forward(ctx: Any, how: RecordOptions, anchor: Tensor | None, *tensors: Any) -> Any:
        inputs = Inputs(*tensors)
        if how.delayed is not None:
            assert how.weights is not None
            inputs = inputs._replace(**vars(how.weights))
            ctx.asked = asked_of(how.weights)
        if how.known is not None:
            assert how.weights is not None
            y, state = forward(runtime_of(how.handle), inputs, how.weights, True, how.known)
        else:
            with torch._C._AutoDispatchBelowAutograd():
                y, state = torch.ops.megamoe.moe_forward(*inputs, how.handle, how.state_bytes, True)
        ctx.how = how
        # A zero gradient of the state would be as large as the state.
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(state)
        ctx.save_for_backward(*inputs, how.handle, state)
        return y, state

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        how: RecordOptions = ctx.how
        if type(how.handle) is not Tensor:  # traced
            *tensors, handle, state = ctx.saved_tensors
            return _operator(Pass(Inputs(*tensors), dy, state), handle, _needs(ctx))
        runtime = runtime_of(how.handle)
        with runtime.together:
            *tensors, _, state = ctx.saved_tensors  # changed in place, freed, or made by hooks
            runtime.group.met = False  # a checkpoint has made the call again
            given, needs = Pass(Inputs(*tensors), dy, state), _needs(ctx)
            if how.delayed is not None:
                anchor, *_ = ctx.next_functions
                # Not by grad(loss, inputs=[x]).
                waits = torch._C._will_engine_execute_node(anchor[0])
                asked = ctx.asked if waits else None
                grads = _delayed(how, runtime, given, needs, asked)
            elif how.adding:
                nodes = dict(zip(Inputs._fields, ctx.next_functions, strict=False))
                of = {n: getattr(needs, n) and _asked(nodes[n][0]) for n in main_grad.NAMES}
                grads = _added(how, runtime, given, needs._replace(**of))
            else:
                known = known_of(how.known, given.inputs)
                direct = how.known is not None and not torch.is_grad_enabled()
                if not direct or (known is None and watched()):
                    return _operator(given, how.handle, needs)
                grads = gradients(runtime, given, GradRequest(needs), known)
            return None, None, grads.x, None, *grads[1:], *[None] * 4


# Function.apply() without its look at each argument for a dead tensor of torch.func: a known call has none.
_apply_known: Any = super(torch.autograd.Function, _Call).apply


def _needs(ctx: Any) -> Needs:
    of_x, _, *others = ctx.needs_input_grad[2:]
    return Needs(of_x, *others[: len(Needs._fields) - 1])


def _operator(given: Pass, handle: Tensor, needs: Needs) -> tuple[Tensor | None, ...]:
    """Return the gradients by the operator, for compilers, observers and create_graph=True."""
    inputs, dy, state = given
    dy = torch.zeros_like(inputs.x) if dy is None else dy.contiguous()
    made = torch.ops.megamoe.moe_backward(dy, *inputs, handle, needs, state)
    of_x, *others = [g if need else None for g, need in zip(made, needs, strict=True)]
    return None, None, of_x, None, *others, *[None] * 4


def _asked(node: Any) -> bool:
    """Whether this backward pass goes on to the node of a weight."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # autograd.grad() asks for the weight itself
        return True


def _added(how: RecordOptions, runtime: Runtime, given: Pass, needs: Needs) -> Gradients:
    """Return the gradients, and add those of w13 and w2 to the main_grad of how.weights."""
    weights = how.weights
    assert weights is not None
    if torch.is_grad_enabled():
        raise ArgumentError("create_graph", True, "False with accumulate_into_main_grad")
    # grad(loss, inputs=[x]) adds nothing
    into = main_grad.targets(weights, (needs.w13, needs.w2), set())
    known = known_of(how.known, given.inputs)
    grads = gradients(runtime, given, GradRequest(needs, into), known)
    return grads._replace(**{name: main_grad.added(getattr(weights, name)) for name in into})


def _delayed(
    how: RecordOptions,
    runtime: Runtime,
    given: Pass,
    needs: Needs,
    asked: frozenset[str] | None,
) -> Gradients:
    """Return the gradients of x and topk_weights, and delay those of weights.

    asked: as for Delayed.add(); None: no weight requires a gradient.
    """
    if torch.is_grad_enabled():
        raise ArgumentError("create_graph", True, "False with delay_wgrad")
    assert how.delayed is not None
    assert how.weights is not None
    stash = None
    if asked is not None and how.delayed.stashes:
        stash = runtime.backend.new_stash()
    found = Gradients()
    if any(needs) or stash is not None:
        found = gradients(runtime, given, GradRequest(needs, stash=stash))
    if asked is not None:
        dy = None if given.dy is None else given.dy.detach()
        how.delayed.add(how.weights, asked, stash or given._replace(dy=dy))
    return found


def _autograd(*args: Any) -> Any:
    *inputs, handle, state_bytes, keep = args
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs):
        return _Call.apply(RecordOptions(handle, state_bytes), None, *inputs)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.megamoe.moe_forward(*inputs, handle, state_bytes, keep)


library.impl("moe_forward", _autograd, "Autograd")


def refuse_tangents(tensors: Any) -> None:
    """Raise ArgumentError for forward-mode derivatives, for which the operators would return zeros."""
    if transforms.has_tangent(tensors):
        raise ArgumentError(
            "a tensor with a forward-mode tangent (torch.func.jvp, jacfwd, torch.autograd.forward_ad) was "
            "given, expected reverse mode: the layer has no forward-mode derivative"
        )


def record(inputs: Inputs, how: RecordOptions) -> Tensor:
    """Call the layer, whose gradients are recorded. inputs: checked."""
    anchor = None
    if how.delayed is not None:
        # The weights are no inputs of the node: autograd would take it that their gradients are zero.
        anchor, inputs = how.delayed.anchor, inputs._replace(**NO_WEIGHTS)
    y, _ = (_Call.apply if how.known is None else _apply_known)(how, anchor, *inputs)
    return y


def apply(inputs: Inputs, handle: Tensor, state_bytes: int = 0, keep: bool = False) -> Tensor:
    """Call the layer by its operator, for compilers and observers. inputs: validated."""
    y: Tensor
    y, _ = torch.ops.megamoe.moe_forward(*inputs, handle, state_bytes, keep)
    return y
