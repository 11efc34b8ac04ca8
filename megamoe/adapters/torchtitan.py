"""Routed experts of torchtitan (0.3) in a megamoe layer, as one of its overrides.

    --override.imports 'megamoe.adapters.torchtitan.megamoe={"max_tokens": 8192}'

Router, shared experts, load balancing and the experts' parameters stay torchtitan's, so that checkpoints, FSDP and
optimizers know nothing of it. Dispatch, experts and combine are one call, over the mesh of expert parallelism.
torchtitan_experts.py says how parameters are read.
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


class MegaRoutedExperts(LibraryModule, RoutedExperts):
    """torchtitan's RoutedExperts in a megamoe layer: its parameters, no token dispatcher.

    Config's backend: of megamoe.Layer. precision: "bf16" or "fp8", of the products. max_tokens: of a call on one rank:
        local batch x sequence length, by the ranks that share a sequence. More raise ArgumentError on all ranks.
        options: of the backends.
    Raises ConfigError for experts that a layer does not compute. Calls and backward passes are collective over the
    mesh of expert parallelism.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        """What `build()` takes."""

        backend: str = "auto"
        precision: str = "bf16"
        max_tokens: int = MAX_TOKENS
        options: dict[str, Any] = field(default_factory=dict)

    def __init__(self, config: Config) -> None:
        check_class(config.inner_experts)
        self._config = config
        self._stated = check(config.backend, config.options, trains=self._problem_over(None))
        super().__init__(config)
        expect_writes(self.inner_experts)
        self._mesh: Any = None

    def parallelize(self, parallel_dims: Any) -> None:
        """Spread the experts as torchtitan does; remember over which ranks."""
        super().parallelize(parallel_dims)
        mesh = parallel_dims.get_optional_mesh("ep")
        if mesh is not None and mesh.size() > 1:
            self._mesh = mesh

    def init_states(self, **options: Any) -> None:
        """Initialize, then lay w1 and w3 behind each other, where they are read in place."""
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
        """x_BLD: [B, L, H], the next two: [B, L, K] -> [B, L, H] in x_BLD's type. The last is not used."""
        layer = self._opened(x_BLD.device)
        x = x_BLD.bfloat16().flatten(0, 1)
        ids, scores = (t.flatten(0, 1) for t in (topk_expert_ids_BLK, topk_scores_BLK))
        with together(layer):
            weights = weights_of(self.inner_experts)
            held = layer.problem.num_local_experts()
            found = weights.w13.shape[0], weights.w2.shape[-1]
            if found != (held, layer.problem.intermediate):
                expected = f"{(held, layer.problem.intermediate)}: no tensor-parallel experts"
                raise ConfigError("experts and their hidden_dim on this rank", found, expected)
        return layer(x, ids, scores, weights).to(x_BLD.dtype).view_as(x_BLD)

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
    """Return the config of MegaRoutedExperts for one of RoutedExperts; torchtitan calls it.

    Options are those of MegaRoutedExperts. Raises ConfigError for quantized experts.
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
    """Free what the layers of a model hold. Collective."""
    close_in(model)
