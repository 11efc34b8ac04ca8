"""The layer as one function: a Layer for each name of a backend, or a backend that the caller made."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megamoe.config import Problem
from megamoe.errors import ArgumentError, ConfigError
from megamoe.formats.quantized import QuantizedRows
from megamoe.formats.weights import ExpertWeights
from megamoe.frontend.autograd import refuse_tangents
from megamoe.frontend.functional import Backend, check_call
from megamoe.frontend.layer import Layer
from megamoe.frontend.rows import Weighting
from megamoe.frontend.runtime import nothing

_shared: dict[tuple[Any, ...], Layer] = {}


def moe_forward(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    weights: ExpertWeights,
    *,
    problem: Problem,
    group: Any = None,
    backend: str | Backend = "auto",
    routed_scaling_factor: float = 1.0,
    apply_router_weight_on_input: bool = False,
    out: Tensor | None = None,
    num_tokens_device: Tensor | None = None,
    x_scale: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Compute the layer on all ranks of `group`. Collective: every rank calls, even for no tokens.

    x: [T, H] bf16, T <= problem.max_tokens and free to differ between ranks.
    topk_ids: [T, K] int32 or int64; an id outside [0, E) is dropped. topk_weights: [T, K] fp32.
    weights: this rank's experts, see ExpertWeights. out: [T, H] bf16 to write y into.
    num_tokens_device: [1] int32 on the device; tokens from there on are not computed, their rows of y undefined.
    x_scale: [T, ceil(H/128)] fp32 of an x in e4m3, as in Layer.
    backend: a name, or what make_backend returned. By name, one Layer per (problem, group, device) is kept until
        close_backends().
    routed_scaling_factor, apply_router_weight_on_input, and gradients: as in Layer. An object as the backend has
        gradients if it is "staged"; none has any while x is quantized.
    Returns y [T, H] bf16. Raises ArgumentError for tensors that do not fit the problem, on all ranks.
    """
    call = x, topk_ids, topk_weights, weights
    if isinstance(backend, str):
        if options.get("delay_wgrad"):
            raise ConfigError(
                "delay_wgrad", True, "False, or a megamoe.Layer, which has backward_dw()"
            )
        options["routed_scaling_factor"] = routed_scaling_factor
        options["apply_router_weight_on_input"] = apply_router_weight_on_input
        layer = _shared_layer(weights, (backend, problem, group), options)
        try:
            check_call(problem, x, topk_ids, topk_weights, out, num_tokens_device, x_scale)
        except ArgumentError as error:
            layer.refuse(error)
            raise
        return layer(*call, num_tokens_device=num_tokens_device, out=out, x_scale=x_scale)
    try:
        check_call(problem, x, topk_ids, topk_weights, out, num_tokens_device, x_scale)
        _check_object(problem, backend, x, topk_weights, weights, out, x_scale)
        how = routed_scaling_factor, apply_router_weight_on_input
        weighting = Weighting.checked(problem, *how)
    except (ArgumentError, ConfigError):
        getattr(backend, "refuse", nothing)()
        raise
    rest = topk_ids, topk_weights, num_tokens_device
    rows: Tensor | QuantizedRows
    if x_scale is None:
        rows, topk_weights = weighting.apply(problem, x, *rest)
    else:
        x_scale, topk_weights = weighting.apply(problem, x_scale, *rest)
        rows = QuantizedRows(x, x_scale)
    return backend.forward(rows, topk_ids, topk_weights, weights, num_tokens_device, out)


def _shared_layer(weights: Any, key: tuple[Any, ...], options: dict[str, Any]) -> Layer:
    """Return the layer of (backend, problem, group), options and device, made if there is none. Collective then."""
    key = (*key, tuple(sorted(options.items())))
    device = getattr(getattr(weights, "w13", None), "device", None)
    if device is None:  # such a call is refused, in the layer that the other ranks call
        device = next((held[-1] for held in _shared if held[:-1] == key), None)
    if (*key, device) not in _shared:
        backend, problem, group, _ = key
        _shared[(*key, device)] = Layer(problem, group, backend=backend, **options)
    return _shared[(*key, device)]


def _check_object(
    problem: Problem,
    backend: Backend,
    x: Tensor,
    topk_weights: Tensor,
    weights: ExpertWeights,
    out: Tensor | None,
    x_scale: Tensor | None,
) -> None:
    """Refuse what a backend given as an object would compute wrongly."""
    if getattr(backend, "problem", problem) != problem:
        raise ArgumentError("problem", problem, f"{backend.problem}, the backend's")  # type: ignore[attr-defined]
    if not isinstance(weights, ExpertWeights):
        raise ArgumentError("weights", type(weights).__name__, "ExpertWeights")
    weights.validate(problem, x.device)
    given = (x,) if x_scale is None else (x, x_scale)
    tensors = (*given, topk_weights, *weights.named().values())
    differentiable = getattr(backend, "differentiable", False)
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        if out is not None:
            raise ArgumentError("out", "given", "None while gradients are recorded")
        if not differentiable:
            expected = "a name, or torch.no_grad(): this object has no gradients"
            raise ArgumentError("backend", type(backend).__name__, expected)
        if x_scale is not None:
            expected = "torch.no_grad() or inference_mode(): a quantized x has no gradient"
            raise ArgumentError("gradients", "recorded", expected)
    if not differentiable:
        refuse_tangents(tensors)


def close_backends() -> None:
    """Close every layer that moe_forward made by name. Collective over their groups."""
    while _shared:
        _shared.popitem()[1].close()
