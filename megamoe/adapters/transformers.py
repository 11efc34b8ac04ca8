"""Run the experts of Hugging Face transformers models (5.20 and newer) in megamoe layers.

    import megamoe.adapters.transformers as adapter

    adapter.register()
    model = AutoModelForCausalLM.from_pretrained(..., dtype=torch.bfloat16, experts_implementation="megamoe")

The experts' parameters stay where they are, so checkpoints, optimizers and `save_pretrained` need no change.
transformers_weights.py reads them. Gradients reach x, routing weights and all float parameters.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers.integrations.finegrained_fp8 import FP8ExpertsInterface
from transformers.integrations.moe import ExpertsInterface
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

from megamoe.adapters.library_layer import (
    MAX_TOKENS,
    LibraryLayer,
    LibraryLayers,
    at_first_call,
    check,
    ranks_of,
    return_window,
    together,
)
from megamoe.adapters.library_parameters import expect_writes
from megamoe.adapters.transformers_lora import run_with_lora
from megamoe.adapters.transformers_weights import (
    activation_of,
    arranged,
    formula_of,
    matrices_of,
    precisions_of,
    weights_of,
)
from megamoe.core.config import Problem
from megamoe.core.errors import ConfigError
from megamoe.formats.weights import ExpertWeights, master_types

try:
    from transformers.distributed.expert_parallel import EPImplementationInterface
except ImportError:  # before 5.23
    EPImplementationInterface = None  # type: ignore[assignment,misc]

NAME = "megamoe"
_numbers = itertools.count(1)

Call = Callable[[Tensor, Tensor, Tensor], Tensor]


class Experts:
    """Call a module's experts through a layer of its own. register() registers an instance.

    Args:
        backend: Backend of megamoe.Layer. Default: "auto".
        precision: See megamoe.Problem. Default: the format in which the weights are stored, bf16 for float types.
        max_tokens: Largest number of tokens per call of the layer; longer inputs take several calls. Default: 8192.
        **options: Options of the backend, and `transposes`, see megamoe.Options.

    Raises:
        ConfigError: An option is invalid.
    """

    def __init__(
        self,
        *,
        backend: str = "auto",
        precision: str | None = None,
        max_tokens: int = MAX_TOKENS,
        **options: Any,
    ) -> None:
        stated = "bf16" if precision is None else precision
        problem = Problem(128, 128, 1, 1, max_tokens=max_tokens, precision=stated)  # raises
        self._stated = check(backend, options, problem)
        self._precision, self._max_tokens = precision, max_tokens
        self._masters = master_types(problem)
        self._modules: WeakKeyDictionary[nn.Module, None] = WeakKeyDictionary()  # in order of calls
        # Closing is collective, and garbage is not collected at the same time on all ranks.
        self._spread: list[LibraryLayer] = []
        self._windows: list[dict[str, Any]] = []  # borrowed, by layers of lost modules, too
        self._number = next(_numbers)

    def __call__(
        self, module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor:
        """Run the experts of a module on one rank.

        Args:
            module: transformers' module of experts.
            hidden_states: [T, H].
            top_k_index: [T, K].
            top_k_weights: [T, K].

        Returns:
            [T, H] in the dtype of hidden_states.

        Raises:
            ConfigError: A layer does not support the module.
        """
        if getattr(module, "_is_expert_parallel", False):
            expected = f'all experts on one rank, or ep_implementation="{NAME}"'
            raise ConfigError("experts", f"{type(module).__name__} over several ranks", expected)
        weights, top_k = weights_of(module, self._masters), top_k_index.shape[-1]
        layer = _with_lora(module) or self._made(module, weights.w2.device, top_k)
        layer = layer or self._make(module, weights, top_k, None)
        x = hidden_states.to(torch.bfloat16)
        calls = (t.split(self._max_tokens) for t in (x, top_k_index, top_k_weights))
        parts = [layer(rows, ids, s, weights) for rows, ids, s in zip(*calls, strict=True)]
        y = parts[0] if len(parts) == 1 else torch.cat(parts)
        return y.to(hidden_states.dtype)

    def over_ranks(self, module: Any, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> Call:
        """Return a function that runs the experts over several ranks, for `ep_implementation`.

        The function is collective. If a call has more than max_tokens tokens, all ranks raise ArgumentError.

        Args:
            module: transformers' module of experts.
            ep_mesh: The expert-parallel ranks. Each holds the same number of experts.
            tp_mesh: Ranks that receive the same tokens. Each passes its slice of them to the layer.

        Returns:
            A function of hidden_states, top_k_index and top_k_weights.
        """

        def call(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            if _with_lora(module):
                raise ConfigError("experts with LoRA", "over several ranks", "on one rank")
            top_k, group = top_k_index.shape[-1], ep_mesh.get_group()
            known = self._made(module, top_k_index.device, top_k)
            with together(known, group):
                weights = weights_of(module, self._masters)
            layer = known or self._make(module, weights, top_k, group)
            x, ids, scores = hidden_states.to(torch.bfloat16), top_k_index, top_k_weights
            if tp_mesh.size() > 1:
                x, ids, scores = (_slice(t, tp_mesh) for t in (x, ids, scores))
            y = layer(x, ids, scores, weights)
            if tp_mesh.size() > 1:
                whole = hidden_states.shape
                shards = DTensor.from_local(
                    y, tp_mesh, [Shard(0)], shape=whole, stride=(whole[1], 1), run_check=False
                )
                y = shards.full_tensor()
            return y.to(hidden_states.dtype)

        return call

    @property
    def num_layers(self) -> int:
        """Number of modules that have been called."""
        return len(self._modules)

    def close(self) -> None:
        """Close all layers and free their memory. The next calls create new ones. Collective if the layers are."""
        for layer in self._spread:
            layer.close()
        for module in self._modules:
            layers: Any = module._megamoe_layers
            for key in [k for k in layers if k[0] == self._number]:
                layers.pop(key).close()
        for window in self._windows:
            return_window(window)
        self._modules.clear()
        self._spread.clear()
        self._windows.clear()
        arranged.clear()

    def _made(self, module: Any, device: torch.device, top_k: int) -> LibraryLayer | None:
        """Return the existing layer, or None if the activation has changed: then all ranks replace it."""
        layers = getattr(module, "_megamoe_layers", None)
        layer = None if layers is None else layers.get((self._number, device, top_k))
        return None if layer is None or layer.made_for != formula_of(module) else layer

    @at_first_call
    def _make(self, module: Any, weights: ExpertWeights, top_k: int, group: Any) -> LibraryLayer:
        device = weights.w2.device
        key = self._number, device, top_k  # a module may be moved
        layer = LibraryLayer(
            lambda _: self._problem(module, weights, top_k, group), group, device, *self._stated
        )
        self._windows.append(layer.borrowed)
        if not hasattr(module, "_megamoe_layers"):
            module._megamoe_layers = LibraryLayers()  # where torch.compile sees them
            expect_writes(module)
        old = module._megamoe_layers.pop(key, None)
        if old is not None and group is None:
            old.close()
        module._megamoe_layers[key] = layer
        layer.made_for = formula_of(module)
        layer.weights_of = partial(weights_of, masters=self._masters)
        self._modules[module] = None
        if group is not None:
            self._spread.append(layer)
        return layer

    def _problem(self, module: Any, weights: ExpertWeights, top_k: int, group: Any) -> Problem:
        num_experts, hidden, _ = weights.w2.shape
        stored = precisions_of(module)
        precision = self._precision or (stored[0] if stored else "bf16")
        if stored and precision not in stored:
            expected = f"{' or '.join(stored)}, as {type(module).__name__} stores its weights"
            raise ConfigError("precision", precision, expected)
        ranks = ranks_of(group)
        activation = activation_of(module)
        planes, rows = activation.planes, weights.w13.shape[1:-1].numel()
        return Problem(
            hidden=hidden,
            intermediate=rows // planes,
            num_experts=num_experts * ranks["ep_size"],
            top_k=top_k,
            max_tokens=self._max_tokens,
            precision=precision,
            activation=activation,
            bias=module.has_bias,
            **ranks,
        )


def _with_lora(module: Any) -> Any:
    """Return what computes experts with the adapters that peft.py has made active, or None without these."""
    adapters = getattr(module, "adapters", None)
    return partial(run_with_lora, adapters, module.activation) if adapters else None


def _slice(tokens: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return this rank's rows of a tensor that all ranks of the mesh have. All rows' gradients reach all ranks."""
    same = DTensor.from_local(tokens, mesh, [Replicate()], run_check=False)
    return same.redistribute(mesh, [Shard(0)]).to_local()


def register(name: str = NAME, **options: Any) -> Experts:
    """Register `experts_implementation=name` with transformers, and `ep_implementation=name` if it has that option.

    Args:
        name: The name. Default: "megamoe".
        **options: Arguments of Experts.

    Returns:
        The registered Experts.

    Raises:
        ConfigError: An option is invalid, or transformers itself uses the name.
    """
    made = Experts(**options)
    found = ExpertsInterface().get(name)
    taken = name == "eager" or not (found is None or isinstance(found, Experts))
    if taken or not isinstance(name, str):
        raise ConfigError("name", repr(name), "one that transformers has not taken")
    for interface in (ExpertsInterface, FP8ExpertsInterface):
        interface.register(name, made)
    if EPImplementationInterface is not None:
        from megamoe.adapters.transformers_packed import PackedQuantizer

        EPImplementationInterface.register(name, partial(Experts.over_ranks, made))
        PackedQuantizer.computes = Experts
        AUTO_QUANTIZER_MAPPING["mxfp4"] = PackedQuantizer
    return made


def find_experts(model: nn.Module) -> tuple[list[str], list[str]]:
    """Return which modules of experts a model hands to `experts_implementation`, and warn about the others.

    Args:
        model: A model of transformers, on any device.

    Returns:
        Names of modules whose experts can run in megamoe, and names of modules with experts that run in their own code
        whatever `experts_implementation` says, such as those of Llama 4.
    """
    taken, left = [], []
    for name, module in model.named_modules():
        # Set by transformers' use_experts_implementation().
        if hasattr(module, "_is_expert_parallel"):
            taken.append(name)
        elif sum(p.dim() == 3 for p in module.parameters(recurse=False)) > 1:
            left.append(name)
    if left:
        logging.getLogger("megamoe").warning(
            "%d modules of experts ignore experts_implementation and run in their own code: %s",
            *(len(left), ", ".join(left[:4])),
        )
    return taken, left


@torch.no_grad()
def relayout(model: nn.Module) -> int:
    """Store transposed experts (GPT-OSS, Aria) in the layout that layers read, so that calls do not copy them.

    Values, shapes and names stay the same; strides change. Only one matrix at a time is copied. Call it before an
    optimizer is created and before FSDP wraps the model.

    Args:
        model: The model.

    Returns:
        The number of matrices that were moved.

    Raises:
        ConfigError: A matrix is a DTensor.
    """
    moved = 0
    for module in model.modules():
        if not getattr(module, "is_transposed", False):
            continue
        precisions_of(module)  # raises
        for matrix in matrices_of(module):
            if not matrix.transpose(1, 2).is_contiguous():
                matrix.data = matrix.data.transpose(1, 2).contiguous().transpose(1, 2)
                moved += 1
    return moved
