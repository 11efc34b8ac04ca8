"""Provide what a training loop needs, because each rank of a layer has its own experts.

Parameters of a layer over R > 1 ranks differ between ranks, and all other ("dense") parameters are equal. Norms,
averages and optimizer states that assume equal ranks are wrong for experts. docs/training.md has the recipes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from megamoe.core.errors import ArgumentError
from megamoe.core.planes import is_dtensor
from megamoe.core.uncompiled import uncompiled
from megamoe.group.group import Group
from megamoe.nn.module import MegaMoE, is_fsdp

_NORM = "grad_norm() or clip_grad_norm_()"


def _layers(model: nn.Module) -> Iterator[tuple[str, MegaMoE]]:
    """Yield (name, layer) of the layers that are spread over several ranks."""
    for name, module in model.named_modules():
        if isinstance(module, MegaMoE) and module.problem.ep_size > 1:
            yield name, module


def _refuse_main_grad(modules: Iterable[tuple[str, nn.Module]]) -> None:
    """Raise ArgumentError if the gradients of an expert are not in `grad`."""
    for name, module in modules:
        if isinstance(module, MegaMoE) and module.accumulate_into_main_grad:
            expected = (
                "False: gradients in main_grad are averaged, scaled and clipped by their owner"
            )
            raise ArgumentError(f"{name or 'model'}.accumulate_into_main_grad", True, expected)


def _power(grads: list[Tensor], norm_type: float) -> Tensor:
    """Return sum |g| ** norm_type (largest |g| for inf) over all elements; DTensors over their meshes."""
    by_mesh: dict[Any, list[Tensor]] = {}
    for grad in grads:
        key = (grad.device_mesh, grad.placements) if is_dtensor(grad) else None
        by_mesh.setdefault(key, []).append(grad)
    total = torch.zeros((), dtype=torch.float32, device=grads[0].device if grads else None)
    for same in by_mesh.values():
        norm = torch.nn.utils.get_total_norm(same, norm_type)
        norm = (norm.full_tensor() if is_dtensor(norm) else norm).float()
        total = _sum(total, norm if norm_type == torch.inf else norm**norm_type, norm_type)
    return total


def _sum(total: Tensor, part: Tensor, norm_type: float) -> Tensor:
    """Return the sum of two results of _power()."""
    return torch.maximum(total, part) if norm_type == torch.inf else total + part


def _model(model: Any) -> nn.Module:
    if not isinstance(model, nn.Module) or next(model.parameters(), None) is None:
        expected = "a torch.nn.Module with parameters: they alone do not say who holds others"
        raise ArgumentError("model", type(model).__name__, expected)
    return model


@torch.no_grad()
def grad_norm(model: nn.Module, norm_type: float = 2.0) -> Tensor:
    """Compute the norm of all gradients, equal on every rank. Collective.

        (sum_dense |g| ** p + sum over the ranks of each expert group of sum_experts |g| ** p) ** (1 / p)

    Dense gradients must be equal on all ranks (averaged, as by DDP) or DTensors (FSDP2). Gradients of experts may be
    plain tensors or DTensors.

    Args:
        model: The model.
        norm_type: p, above 0, or inf. Default: 2.0.

    Returns:
        The norm, [] fp32.

    Raises:
        ArgumentError: `model` is no module, norm_type is invalid, or a gradient is sparse, delayed or in main_grad.
    """
    return _grad_norm(model, norm_type)


def _grad_norm(model: nn.Module, norm_type: float, max_norm: float | Tensor = 0.0) -> Tensor:
    groups = dict.fromkeys(Group.of(layer.group) for _, layer in _layers(_model(model)))
    with ExitStack() as stack:
        for ranks in reversed(groups):
            stack.enter_context(ranks.together(_NORM))
        if not isinstance(max_norm, (int, float, Tensor)) or not max_norm >= 0:
            raise ArgumentError("max_norm", repr(max_norm), "a number, at least 0")
        if not isinstance(norm_type, (int, float)) or not norm_type > 0:
            raise ArgumentError("norm_type", repr(norm_type), "a number above 0, or float('inf')")
        norm_type = float(norm_type)
        _refuse_main_grad(model.named_modules())
        for name, module in model.named_modules():
            if isinstance(module, MegaMoE) and module.num_delayed:
                waiting = f"{module.num_delayed} backward passes that wait for backward_dw()"
                raise ArgumentError(name or "model", waiting, "none: call backward_dw() first")
        for name, p in model.named_parameters():
            if p.grad is not None and p.grad.layout != torch.strided:
                raise ArgumentError(f"{name}.grad.layout", p.grad.layout, "torch.strided")
        for ranks in groups:
            ranks.begin(_NORM)
    own = {  # the group of parameters that are spread without DTensor saying so
        id(p): layer.group
        for _, layer in _layers(model)
        for p in layer.parameters()
        if not layer.place.distributed
    }
    grads: dict[Any, list[Tensor]] = {group: [] for group in (None, *own.values())}
    for p in model.parameters():
        if p.grad is not None:
            grads[own.get(id(p))].append(p.grad)
    device, largest = next(model.parameters()).device, norm_type == torch.inf
    total = torch.zeros((), device=device)
    for group, same in grads.items():
        part = _power(same, norm_type).to(device)
        if group is not None:
            dist.all_reduce(part, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
        total = _sum(total, part, norm_type)
    return total if largest else total ** (1 / norm_type)


@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale all gradients by min(1, max_norm / (grad_norm(model) + 1e-6)). Collective.

    Args:
        model: The model.
        max_norm: Largest norm, at least 0.
        norm_type: p, above 0, or inf. Default: 2.0.
        error_if_nonfinite: True: raise RuntimeError if the norm is not finite. Default: False.

    Returns:
        The norm before scaling, [] fp32.

    Raises:
        ArgumentError: As for grad_norm(), or max_norm is invalid.
    """
    total = _grad_norm(model, norm_type, max_norm)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(f"the gradients' norm of order {norm_type} is {float(total)}")
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    local = [g.to_local() if is_dtensor(g) else g for g in grads]
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for grad in local:
        grad.mul_(scale.to(grad.device))
    return total


def ignore_experts_in_ddp(model: nn.Module) -> list[str]:
    """Exclude the experts of `model` from DDP, which would overwrite them with rank 0's and average their gradients.

    Args:
        model: The module that DDP will wrap. Call this before wrapping.

    Returns:
        The names of the excluded parameters and buffers.
    """
    names = list(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    for prefix, layer in _layers(model):
        names += [
            f"{prefix}.{n}" if prefix else n
            for n, _ in (*layer.named_parameters(), *layer.named_buffers())
        ]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    return names


@torch.no_grad()
def quantize_experts(model: nn.Module) -> None:
    """Quantize the experts of all FP8 layers of `model` now if they were written, instead of at the next call.

    No call is needed for correct results: layers notice steps and writes. Not collective, except where Megatron still
    gathers parameters. FSDP2's shards and layers without a call yet are left alone.

    Args:
        model: The model.
    """
    _quantize(_model(model))


def _quantize(model: nn.Module, follows: bool = False) -> None:
    for module in model.modules():
        if (quantize := _quantizer(module)) is not None:
            quantize(follows)


def _quantizer(module: nn.Module) -> Callable[[bool], None] | None:
    """Return what quantizes the experts of this module, of an adapter too; None where it holds none."""
    if hasattr(type(module), "quantize_experts"):
        return cast(Any, module).quantize_experts
    layers: Any = getattr(module, "_megamoe_layers", None)  # transformers', after the first call
    return None if layers is None else partial(layers.quantize_experts, module)


def after_step(optimizer: Optimizer, model: nn.Module) -> None:
    """Quantize the experts of `model` after every step of `optimizer`, by torch's hook for optimizers.

    A layer would do the same at its next call. But a CUDA graph quantizes in each call that it contains, unless it
    knows that the step does: call this before the capture, for each optimizer of the experts. Then other writes between
    replays need quantize_experts().

    Args:
        optimizer: A torch.optim.Optimizer, or accelerate's, that holds experts of `model`. After the step() of other
            optimizers, such as Megatron's, call quantize_experts().
        model: The model. Experts of transformers are known after their first call.

    Raises:
        ArgumentError: `optimizer` is something else, or holds no experts of `model`.
    """
    inner = getattr(optimizer, "optimizer", optimizer)  # accelerate's
    expected = "a torch.optim.Optimizer; call quantize_experts(model) after the step() of others"
    if not isinstance(optimizer, Optimizer) or not isinstance(inner, Optimizer):
        raise ArgumentError("optimizer", type(optimizer).__name__, expected)
    held = {id(p) for group in inner.param_groups for p in group["params"]}
    known = [module for module in _model(model).modules() if _quantizer(module) is not None]
    if not any(id(p) in held for module in known or [model] for p in module.parameters()):
        raise ArgumentError("optimizer", "one without experts of the model", expected)
    steps, of = weakref.ref(inner), weakref.ref(model)

    @uncompiled("quantizing is not traced")
    @torch.no_grad()
    def quantize(stepped: Optimizer, *_: Any) -> None:
        net = of()
        if net is not None and stepped is steps():
            _quantize(net, follows=True)

    # Of all optimizers: these hooks run in order, and the first one counts the step.
    handle = register_optimizer_step_post_hook(quantize)
    weakref.finalize(inner, handle.remove)


def _check_not_sharded(layer: MegaMoE) -> None:
    """Raise ArgumentError if FSDP2 shards experts with a module around the layer, and so divides by other ranks."""
    for name, p in layer.named_parameters():
        if is_dtensor(p) and (p.device_mesh.ndim > 1 or not layer.place.distributed):
            expected = "whole, or sharded by a fully_shard() of the layer's own"
            raise ArgumentError(name, "sharded by a module around the layer", expected)


def average_expert_gradients(model: nn.Module, num_ranks: int) -> None:
    """Divide the experts' gradients by num_ranks, so that they are means over ranks like those of DDP and FSDP2.

    Every rank differentiates its own loss L_r. DDP and FSDP2 give a dense parameter sum_r dL_r / R. A layer's backward
    pass gives an expert sum_r dL_r over the ranks of its group. If num_ranks is larger than the group, also sum the
    experts' gradients over its copies (FSDP2 does, on a mesh of the copies). Call this once, after fully_shard().

    Args:
        model: The model.
        num_ranks: R, the ranks over which dense gradients are averaged.

    Raises:
        ArgumentError: It was called before, or before fully_shard(), or num_ranks is invalid.
    """
    _refuse_main_grad(_layers(model))
    if isinstance(num_ranks, bool) or not isinstance(num_ranks, int) or num_ranks < 1:
        raise ArgumentError("num_ranks", repr(num_ranks), "a positive int, the number of ranks")
    for name, layer in _layers(model):
        if layer.averaged:
            raise ArgumentError(name or "model", "averaged already", "one call")
        if not is_fsdp(layer):
            _check_not_sharded(layer)
    for _, layer in _layers(model):
        layer.divide_gradients(num_ranks)
