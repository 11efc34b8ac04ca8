"""Run the routed experts of Megatron-Core's MoE layers (0.16) in a megamoe layer.

    import megamoe.adapters.megatron as adapter

    spec = adapter.replace(get_gpt_layer_local_spec(num_experts=128, ...), max_tokens=4096)
    model = GPTModel(config, transformer_layer_spec=spec, ...)

Router, shared experts, recomputation and the experts' parameters stay Megatron's, so checkpoints, optimizers and its
DDP need no change. Dispatch, experts and combine are one call over the expert-parallel group. megatron_experts.py reads
the parameters and lists the unsupported configurations.
"""

from __future__ import annotations

import dataclasses
from abc import ABCMeta
from typing import Any, Literal

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor, nn

from megamoe.adapters.library_layer import (
    MAX_TOKENS,
    LibraryLayer,
    LibraryModule,
    check,
    close_in,
    ranks_of,
    together,
)
from megamoe.adapters.library_parameters import expect_writes
from megamoe.adapters.megatron_experts import (
    activation_of,
    adds_to_main_grad,
    await_parameters,
    check_config,
    check_experts,
    check_padding,
    check_types,
    lie_descending,
    routes_of,
    tie_experts,
    turned_ids,
    weights_of,
)
from megamoe.core.config import Problem
from megamoe.core.errors import ConfigError
from megamoe.formats.weights import ExpertWeights, master_types
from megamoe.group.group import Group, RankConfig


class _Undispatched(MoETokenDispatcher):
    """Leave tokens where they are: the layer dispatches and combines. Megatron also keeps a call's routes here."""

    def dispatch_preprocess(
        self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        self.hidden_shape, self.routing_map = hidden_states.shape, routing_map
        return hidden_states.reshape(-1, hidden_states.shape[-1]), probs

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        return hidden_states, probs

    def dispatch_postprocess(
        self, hidden_states: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return hidden_states, topk_ids [T, K] and their probabilities [T, K]. routed_experts_compute() calls it."""
        check_padding(self.config)
        routes = routes_of(probs, self.routing_map, self.config.moe_router_topk)
        self.topk_ids, topk_weights = routes
        return hidden_states, self.topk_ids, topk_weights

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        return hidden_states

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        return hidden_states

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        return hidden_states.view(self.hidden_shape)


class _EqualToItsBase(ABCMeta):
    """Compare equal to MoELayer: TransformerLayer passes process groups only to modules `in (MoELayer, ...)`."""

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is MoELayer

    __hash__ = ABCMeta.__hash__


class MegaMoELayer(LibraryModule, MoELayer, metaclass=_EqualToItsBase):
    """Replace Megatron's MoELayer; the routed experts run in a megamoe layer.

    Calls, backward passes and close() are collective over the expert-parallel group. If a call has more than
    `max_tokens` tokens, all ranks raise ArgumentError.

    Args:
        config: Megatron's TransformerConfig.
        submodules: As for MoELayer.
        layer_number: As for MoELayer.
        pg_collection: Megatron's process groups. Default: Megatron's own.
        backend: Backend of megamoe.Layer. Default: "auto".
        precision: "bf16" or "fp8", of the products; the parameters are bf16, with "fp8" also fp32. Default: "bf16".
        max_tokens: Largest number of tokens per rank and call: sequence length x micro-batch / ranks that share a
            sequence. Default: 8192.
        delay_wgrad: As for megamoe.Layer. Default: False.
        **options: Options of the backend.

    Raises:
        ConfigError: A layer does not support the configuration or the experts.
    """

    def __init__(
        self,
        config: Any,
        submodules: Any = None,
        layer_number: int | None = None,
        pg_collection: Any = None,
        *,
        backend: str = "auto",
        precision: str = "bf16",
        max_tokens: int = MAX_TOKENS,
        delay_wgrad: bool | Literal["keep"] = False,
        **options: Any,
    ) -> None:
        if pg_collection is None:
            pg_collection = get_default_pg_collection()
        check_config(config, pg_collection)
        self._problem = Problem(
            hidden=config.hidden_size,
            intermediate=config.moe_ffn_hidden_size,
            num_experts=config.num_moe_experts,
            top_k=config.moe_router_topk,
            max_tokens=max_tokens,
            precision=precision,
            activation=activation_of(config),
            bias=config.add_bias_linear,
            **ranks_of(pg_collection.ep),
        )
        self._stated = check(backend, options, self._problem, trains=True)
        super().__init__(config, submodules, layer_number, pg_collection)
        check_experts(self.experts)
        tie_experts(self.experts)
        expect_writes(self.experts)
        self.token_dispatcher = _Undispatched(config, pg_collection)
        self._delay_wgrad, self._descending = delay_wgrad, False

    def routed_experts_compute(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Run dispatch, experts and combine: [T, H] bf16 and probs [T, E] -> ([T, H], None). Collective."""
        layer = self._opened(hidden_states.device)
        with together(layer):
            routed = self.token_dispatcher.dispatch_postprocess(hidden_states, probs)
            x, topk_ids, topk_weights = routed
            weights = self._weights(layer)
        if self._descending:
            topk_ids = turned_ids(topk_ids, self.num_local_experts)
        return layer(x, topk_ids, topk_weights, weights), None

    def _weights(self, layer: LibraryLayer) -> ExpertWeights:
        await_parameters(self.experts)
        adding = layer.accumulate_into_main_grad
        reads = {"descending": self._descending, "copies": self._problem.formats.w.scaled}
        return weights_of(self.experts, adding=adding, **reads)

    def quantize_experts(self, follows: bool = False) -> None:
        """Do as megamoe.quantize_experts(), for this layer. It waits for parameters that Megatron still gathers.

        Args:
            follows: As for megamoe.Layer.quantize(). Default: False.
        """
        if self._layer is not None:
            self._layer.quantize(self._weights(self._layer), follows)

    def _open(self, device: torch.device) -> LibraryLayer:
        group = None if self._problem.ep_size == 1 else self.ep_group
        ranks = Group(group)

        def state() -> RankConfig:
            check_experts(self.experts)  # again: they may have been wrapped
            # Not before: Float16Module casts.
            check_types(self.experts, master_types(self._problem))
            return RankConfig(lie_descending(self.experts))

        # A rank's ids name experts of all, so all have one order, which stays when parameters move.
        self._descending = all(ranks.agree("set-up", state).values())
        return LibraryLayer(
            self._problem,
            group,
            device,
            *self._stated,
            apply_router_weight_on_input=self.config.moe_apply_probs_on_input,
            accumulate_into_main_grad=adds_to_main_grad(self.experts),
            delay_wgrad=self._delay_wgrad,
        )

    def backward_dw(
        self, routed_experts: bool = True, shared_experts: bool = False, passes: int = 1
    ) -> None:
        """Compute the delayed weight gradients, see megamoe.Layer.backward_dw(). Collective.

        Args:
            routed_experts: True: those of the routed experts. Default: True.
            shared_experts: True: those of the shared experts, by Megatron. Default: False.
            passes: Number of oldest backward passes of the routed experts. Default: 1.

        Raises:
            ConfigError: The layer was created without delay_wgrad, or there was no call.
        """
        if routed_experts:
            if self._layer is None or not self._delay_wgrad:
                raise ConfigError("delay_wgrad", self._delay_wgrad, "True, and a call before")
            self._layer.backward_dw(passes)
        super().backward_dw(routed_experts=False, shared_experts=shared_experts)


def replace(spec: Any, **options: Any) -> Any:
    """Copy the spec of a layer or block with a MegaMoELayer in place of each MoELayer.

    Args:
        spec: Megatron's ModuleSpec or block spec. It is not changed.
        **options: Arguments of MegaMoELayer, by name.

    Returns:
        The new spec.

    Raises:
        ConfigError: `spec` has no MoELayer.
    """
    count = 0

    def replaced(node: Any) -> Any:
        nonlocal count
        if isinstance(node, ModuleSpec) and node.module is MoELayer:
            count += 1
            return dataclasses.replace(node, module=MegaMoELayer, params=node.params | options)
        if dataclasses.is_dataclass(node) and not isinstance(node, type):
            names = [f.name for f in dataclasses.fields(node) if f.init]
            return dataclasses.replace(node, **{n: replaced(getattr(node, n)) for n in names})
        return [replaced(n) for n in node] if isinstance(node, list) else node

    made = replaced(spec)
    if not count:
        raise ConfigError("spec", type(spec).__name__, "one with a MoELayer")
    return made


def close(model: nn.Module) -> None:
    """Free the memory of all megamoe layers of a model. Collective."""
    close_in(model)
