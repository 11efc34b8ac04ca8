"""Run torchtitan's routed experts (0.3) in a megamoe layer, as a torchtitan override.

    --override.imports 'megamoe.adapters.torchtitan.megamoe={"max_tokens": 8192}'

Router, shared experts, load balancing and the experts' parameters stay torchtitan's, so checkpoints, FSDP and
optimizers need no change. Dispatch, experts and combine are one call over the expert-parallel mesh.
torchtitan_experts.py reads the parameters.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import spmd_types
import torch
from torch import Tensor, nn
from torchtitan.config.override import derive, override
from torchtitan.models.common.moe import RoutedExperts
from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts

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
from megamoe.adapters.torchtitan_experts import (
    activation_of,
    check_class,
    check_modules,
    tie_experts,
    weights_of,
)
from megamoe.core.config import Problem
from megamoe.core.errors import ConfigError
from megamoe.formats.versions import invalidate
from megamoe.formats.weights import expected_weights, master_types


class MegaRoutedExperts(LibraryModule, RoutedExperts):
    """Replace torchtitan's RoutedExperts: it has the same parameters and no token dispatcher.

    Calls and backward passes are collective over the expert-parallel mesh.

    Raises:
        ConfigError: A layer does not support the experts.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        """Extend RoutedExperts.Config.

        Args:
            backend: Backend of megamoe.Layer. Default: "auto".
            precision: "bf16" or "fp8", of the products. Default: "bf16".
            max_tokens: Largest number of tokens per rank and call: local batch x sequence length / ranks that share a
                sequence. If a call has more, all ranks raise ArgumentError. Default: 8192.
            options: Options of the backend. Default: none.
        """

        backend: str = "auto"
        precision: str = "bf16"
        max_tokens: int = MAX_TOKENS
        options: dict[str, Any] = field(default_factory=dict)

    def __init__(self, config: Config) -> None:
        check_class(config.inner_experts)
        self._config = config
        problem = self._problem_over(None)
        self._stated = check(config.backend, config.options, problem, trains=True)
        self._masters = master_types(problem)
        super().__init__(config)
        expect_writes(self.inner_experts)
        self._mesh: Any = None

    def parallelize(self, parallel_dims: Any) -> None:
        """Shard the experts as torchtitan does, and record the expert-parallel mesh."""
        super().parallelize(parallel_dims)
        mesh = parallel_dims.get_optional_mesh("ep")
        if mesh is not None and mesh.size() > 1:
            self._mesh = mesh

    def init_states(self, **options: Any) -> None:
        """Initialize the parameters, then place w1 and w3 in one tensor, where the layer reads them without a copy."""
        super().init_states(**options)
        invalidate()
        tie_experts(self.inner_experts)

    def forward(
        self,
        x_BLD: Tensor,
        topk_scores_BLK: Tensor,
        topk_expert_ids_BLK: Tensor,
        num_local_tokens_per_expert_E: Tensor,
    ) -> Tensor:
        """Run dispatch, experts and combine: [B, L, H] -> [B, L, H] of the same dtype. Collective."""
        layer = self._opened(x_BLD.device)
        x = x_BLD.bfloat16().flatten(0, 1)
        ids, scores = (t.flatten(0, 1) for t in (topk_expert_ids_BLK, topk_scores_BLK))
        with together(layer):
            weights = weights_of(self.inner_experts, self._masters)
            held = layer.problem.num_local_experts()
            found = weights.w13.shape[0], weights.w2.shape[-1]
            if found != (held, layer.problem.intermediate):
                expected = f"{(held, layer.problem.intermediate)}: no tensor-parallel experts"
                raise ConfigError("experts and their hidden_dim on this rank", found, expected)
        return layer(x, ids, scores, weights).to(x_BLD.dtype).view_as(x_BLD)

    def quantize_experts(self, follows: bool = False) -> None:
        """Do as megamoe.quantize_experts(), for these experts. FSDP2's shards are left alone.

        Args:
            follows: As for megamoe.Layer.quantize(). Default: False.
        """
        layer = self._layer
        if layer is None:
            return
        weights, problem = weights_of(self.inner_experts, self._masters), layer.problem
        if tuple(weights.w2.shape) == expected_weights(problem)["w2"][0]:
            layer.quantize(weights, follows)

    def _problem_over(self, group: Any) -> Problem:
        config = self._config
        inner = config.inner_experts
        return Problem(
            hidden=inner.dim,
            intermediate=inner.hidden_dim,
            num_experts=inner.num_experts,
            top_k=config.token_dispatcher.top_k,
            max_tokens=config.max_tokens,
            precision=config.precision,
            activation=activation_of(inner),
            bias=isinstance(inner, GptOssGroupedExperts.Config),
            **ranks_of(group),
        )

    def _open(self, device: torch.device) -> LibraryLayer:
        group = None if self._mesh is None else self._mesh.get_group()

        def problem(_: Any) -> Problem:
            if spmd_types.is_type_checking():
                raise ConfigError("debug.spmd_typechecking", True, "False with a megamoe layer")
            check_modules(self.inner_experts)
            return self._problem_over(group)

        return LibraryLayer(problem, group, device, *self._stated)


@override(target=RoutedExperts.Config, exact=True, description="Experts in a megamoe layer.")
def megamoe(
    config: RoutedExperts.Config,
    *,
    backend: str = "auto",
    precision: str = "bf16",
    max_tokens: int = MAX_TOKENS,
    **options: Any,
) -> MegaRoutedExperts.Config:
    """Convert a RoutedExperts config to one of MegaRoutedExperts. torchtitan calls it.

    Args:
        config: The config of the experts.
        backend: Backend of megamoe.Layer. Default: "auto".
        precision: "bf16" or "fp8", of the products. Default: "bf16".
        max_tokens: Largest number of tokens per rank and call. Default: 8192.
        **options: Options of the backend.

    Returns:
        The new config.

    Raises:
        ConfigError: The experts are quantized.
    """
    check_class(config.inner_experts)
    dispatcher = config.token_dispatcher
    routes = {"num_experts": dispatcher.num_experts, "top_k": dispatcher.top_k}
    return derive(
        config,
        MegaRoutedExperts.Config,
        token_dispatcher=LocalTokenDispatcher.Config(**routes),  # not called; takes no memory
        backend=backend,
        precision=precision,
        max_tokens=max_tokens,
        options=options,
    )


def close(model: nn.Module) -> None:
    """Free the memory of all megamoe layers of a model. Collective."""
    close_in(model)
