"""Convert the arguments of a call to what the operators take: cast, weighted, contiguous."""

from __future__ import annotations

from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megamoe.backends.call import check_call
from megamoe.backends.options import Options
from megamoe.core.config import Problem
from megamoe.core.errors import ArgumentError, ConfigError
from megamoe.core.planes import check_kind, check_memory
from megamoe.formats.weights import check_experts
from megamoe.layer.inputs import Inputs


def finite_factor(factor: Any) -> float:
    """Return routed_scaling_factor as a float. Raises ConfigError unless it is a finite number."""
    if not (isinstance(factor, (int, float)) and isfinite(factor)):
        raise ConfigError("routed_scaling_factor", factor, "a finite number")
    return float(factor)


class Weighting(NamedTuple):
    """Say where routing weights are applied.

    factor: factor of y, applied to topk_weights in fp32. on_input: True: y = factor * expert(bf16(x * topk_weights))
    instead of factor * topk_weights * expert(x); for top_k 1.
    """

    factor: float = 1.0
    on_input: bool = False

    @classmethod
    def of(cls, problem: Problem, options: Options) -> Weighting:
        """Return that of a layer. Raises ConfigError for a factor or flag that is invalid, or needs another top_k."""
        factor = finite_factor(options.routed_scaling_factor)
        on_input = options.apply_router_weight_on_input
        if not isinstance(on_input, bool):
            raise ConfigError("apply_router_weight_on_input", repr(on_input), "a bool")
        if on_input and problem.top_k != 1:
            expected = (
                f"False with top_k {problem.top_k}: x is fetched once a rank, for all experts there"
            )
            raise ConfigError("apply_router_weight_on_input", True, expected)
        return cls(factor, on_input)

    def apply(self, problem: Problem, inputs: Inputs) -> Inputs:
        """Return the inputs, with topk_weights in fp32, as the layer uses them; differentiable."""
        of_x = "x" if inputs.x_scale is None else "x_scale"  # what a factor of x multiplies
        x, topk_weights = getattr(inputs, of_x), inputs.topk_weights
        if self.on_input:
            if torch.is_grad_enabled() and (x.requires_grad or topk_weights.requires_grad):
                # The gradient of a token that is not computed is zero, but times a NaN it would be NaN.
                used = _computed(problem, inputs.topk_ids, inputs.num_tokens_device)
                x, topk_weights = x.where(used, 0), topk_weights.where(used, 0)
            x, topk_weights = (x * topk_weights).to(x.dtype), torch.ones_like(topk_weights)
        if self.factor != 1.0:
            topk_weights = topk_weights * self.factor
        return inputs._replace(topk_weights=topk_weights, **{of_x: x})


def _computed(problem: Problem, topk_ids: Tensor, num_tokens_device: Tensor | None) -> Tensor:
    used = (topk_ids >= 0) & (topk_ids < problem.num_experts)
    if num_tokens_device is None:
        return used
    tokens = torch.arange(topk_ids.numel(), device=topk_ids.device).view(topk_ids.shape)
    return used & (tokens < num_tokens_device)


def taken(inputs: Inputs) -> Inputs:
    """Return the inputs cast and contiguous, as the operators take them. It validates nothing."""
    x, topk_weights = inputs.x, inputs.topk_weights
    if x.dtype in (torch.float32, torch.float16) and torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.bfloat16)
    if topk_weights.is_floating_point():
        topk_weights = topk_weights.float()
    if not torch.compiler.is_compiling():
        x, topk_weights = x.resolve_neg(), topk_weights.resolve_neg()
    return inputs._replace(
        x=x.contiguous(),
        topk_ids=inputs.topk_ids.contiguous(),
        topk_weights=topk_weights.contiguous(),
        x_scale=None if inputs.x_scale is None else inputs.x_scale.contiguous(),
    )


def checked(problem: Problem, inputs: Inputs) -> Inputs:
    """Return validated inputs as the operators take them. Raises ArgumentError if they do not fit the problem."""
    given = inputs._asdict()
    for name in ("x", "topk_ids", "topk_weights", "x_scale"):
        tensor = given[name]
        if tensor is None and name == "x_scale":
            continue
        if not isinstance(tensor, Tensor):
            raise ArgumentError(name, type(tensor).__name__, "a tensor")
        check_kind(name, tensor)
        check_memory(name, tensor)  # before it is cast
        if tensor.dim() < 2:
            raise ArgumentError(f"{name}.shape", list(tensor.shape), "at least two dimensions")
        if tensor.shape[:-1] != inputs.x.shape[:-1]:
            width = {"x_scale": "S"}.get(name, problem.top_k)
            expected = f"{list(inputs.x.shape[:-1])} + [{width}], the leading sizes of x"
            raise ArgumentError(f"{name}.shape", list(tensor.shape), expected)
    if not inputs.topk_weights.is_floating_point():
        raise ArgumentError("topk_weights.dtype", inputs.topk_weights.dtype, "a float type")
    inputs = taken(inputs)
    weights = inputs.weights
    check_call(problem, inputs.call(weights))
    check_weights(problem, weights, inputs.x.device)
    return inputs


def check_weights(problem: Problem, weights: Any, device: torch.device | None) -> None:
    """Raise ArgumentError unless weights fit the problem: masters, or as its precision stores them."""
    check_experts("weights", weights)
    if weights.w13.is_meta:
        raise ArgumentError("weights.w13.device", "meta", "a device with memory")
    weights.validate(problem, device, masters=True)
