"""The layer's gradients: by the backend, from the state that its forward kept.

That is collective, so every rank must need the same gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megamoe.backends.call import Gradients, KeptRows, Wanted
from megamoe.core.config import Problem
from megamoe.core.errors import ArgumentError
from megamoe.core.planes import check_memory
from megamoe.formats.weights import ExpertWeights, check_tensor
from megamoe.layer.inputs import Inputs, flat
from megamoe.layer.runtime import Runtime

ALIGNMENT = 16  # bytes, of what the kernel reads


def gradients(
    runtime: Runtime, inputs: Inputs, dy: Tensor | None, state: Tensor, wanted: Wanted
) -> Gradients:
    """Return the gradients of a call in the dtypes, shapes and strides of its inputs. Collective.

    dy: like x; None is zero. state: that the call's forward kept, never changed.
    wanted: without `turned`, which is made here.
    Raises ArgumentError for a dy that is unlike y.
    """
    x = inputs.x
    dy = _checked(dy, x)
    _check_there(runtime.problem, inputs)
    for name, t in inputs.named():
        check_memory(name, t)
    check_tensor("state", state, (runtime.state_bytes,), torch.uint8, x.device)

    with runtime.lock:
        found = _made(runtime, inputs, dy, state, wanted)
    return _finished(runtime, found, wanted, inputs)


def kept_gradients(
    runtime: Runtime, weights: ExpertWeights, kept: Sequence[KeptRows], wanted: Wanted
) -> Gradients:
    """Return the weights' gradients of passes that were kept, as gradients() does. Not collective."""
    with runtime.lock:
        found = runtime.backend.weight_gradients(weights, kept, wanted)
    return _finished(runtime, found, wanted, weights)


def _finished(
    runtime: Runtime, found: Gradients, wanted: Wanted, of: Inputs | ExpertWeights
) -> Gradients:
    """Return gradients as autograd takes them. of: what they are of, by name."""
    laid_out: dict[str, Tensor] = {}
    for name, need in wanted.needs._asdict().items():
        grad, leaf = getattr(found, name), getattr(of, name, None)
        if not need or grad is None or leaf is None:
            continue
        grad = _laid_out(grad, leaf)
        of_weights = name not in ("x", "topk_weights")
        mean = of_weights and runtime.mean_over != 1
        laid_out[name] = grad / runtime.mean_over if mean else grad
    return Gradients(**laid_out)


def _made(runtime: Runtime, inputs: Inputs, dy: Tensor, state: Tensor, wanted: Wanted) -> Gradients:
    """Make the gradients, see gradients()."""
    given = inputs.weights
    if runtime.backend.recomputes:
        given = runtime.weights(given)
    else:
        wanted = wanted._replace(turned=runtime.turned(given))
    return runtime.backend.backward(inputs.call(given), flat(dy), state, wanted)


def _checked(dy: Tensor | None, x: Tensor) -> Tensor:
    """Return dy as the kernel reads it."""
    if dy is None:
        return torch.zeros_like(x)
    if isinstance(dy, Tensor) and dy.layout != torch.strided:
        raise ArgumentError("dy.layout", dy.layout, "torch.strided: a dense gradient of y")
    if isinstance(dy, Tensor) and not dy.is_contiguous():
        dy = dy.contiguous()
    if isinstance(dy, Tensor) and dy.is_neg():
        dy = dy.resolve_neg()
    check_tensor("dy", dy, tuple(x.shape), torch.bfloat16, x.device)
    # A slice of a larger gradient may lie elsewhere than at a multiple.
    return dy.clone() if dy.data_ptr() % ALIGNMENT else dy


def _check_there(problem: Problem, inputs: Inputs) -> None:
    """Refuse weights whose memory was given away behind the call, as frameworks do that shard by `p.data = ...`."""
    matrix = problem.num_local_experts(problem.rank) * problem.intermediate * problem.hidden
    planes = problem.activation.planes
    for name, w, count in (("w13", inputs.w13, planes * matrix), ("w2", inputs.w2, matrix)):
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
