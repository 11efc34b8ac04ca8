"""Add a megamoe layer to the mega kernels of FlashInfer's expert-parallel layer (moe_ep, 0.7).

    import megamoe.adapters.flashinfer as adapter

    kernel = adapter.MegaMoEConfig(intermediate_size=2048, top_k=8)
    layer = MoEEpLayer(bootstrap, fleet_params, MoEWeightPack(w13, w2), backend=MegaConfig(megakernel=kernel))

FlashInfer validates sizes, owns the workspaces and makes the calls. Weights in the precision's own format are read in
place.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from flashinfer.moe_ep.core.kernel.base import MegaKernelBackend
from flashinfer.moe_ep.core.kernel.registry import register_mega_kernel
from flashinfer.moe_ep.core.validation.common import validate_mega_forward_inputs
from torch import Tensor

from megamoe.adapters.library_layer import LibraryLayer, check, together
from megamoe.core.config import Activation, Problem, activation_by_name
from megamoe.core.errors import ArgumentError, ConfigError
from megamoe.core.table import E4M3_BLOCKS, MXFP4
from megamoe.formats.weights import ExpertWeights

NAME = "megamoe"
_FACTORS = "fc1_alpha", "fc2_alpha", "fc1_norm_const"  # of calls of kernels for NVFP4


@dataclass
class MegaMoEConfig:
    """Configure a megamoe layer for FlashInfer: pass it as MegaConfig(megakernel=...).

    Args:
        intermediate_size: I of each expert.
        top_k: K, the experts per token.
        precision: Format of the products, see megamoe.Problem. Default: "bf16".
        activation: A name or an Activation. Default: "swiglu".
        backend: Backend of megamoe.Layer. Default: "auto".
        options: Options of the backend. Default: none.
        kernel_name: Name in FlashInfer's registry. Do not change it.
    """

    intermediate_size: int
    top_k: int
    precision: str = "bf16"
    activation: str | Activation = "swiglu"
    backend: str = "auto"
    options: dict[str, Any] = field(default_factory=dict)
    kernel_name: str = NAME


class Workspace:
    """Hold a layer of one capacity and, between stage_inputs() and compute(), the arguments of its call."""

    def __init__(self, layer: LibraryLayer) -> None:
        self.layer = layer
        self.staged: tuple[Tensor, Tensor, Tensor, Tensor | None] | None = None

    def destroy(self) -> None:
        """Free the layer. Collective."""
        self.layer.close()


@register_mega_kernel(NAME)
class MegaMoEKernel(MegaKernelBackend):
    """Run a megamoe layer as FlashInfer's kernel. FlashInfer creates it from a MegaMoEConfig and calls its methods.

    It accepts three kinds of weights: packs of bf16 or fp32, which are quantized if the precision requires it; packs
    with the precision's own scales (e4m3 with fp32 per 128 x 128, or packed e2m1 with E8M0 per 32 numbers); and
    ExpertWeights as `transformed_weights`.

    Raises:
        ConfigError: `config` is no MegaMoEConfig, or no layer supports a size or an option.
        ArgumentError: The weights or the tensors of a call do not fit.
    """

    def __init__(self, config: MegaMoEConfig) -> None:
        if not isinstance(config, MegaMoEConfig):
            raise ConfigError("megakernel", type(config).__name__, "MegaMoEConfig")
        super().__init__(config)
        self._stated = config
        # By tokens of a call, of which FlashInfer has one workspace.
        self._layers: dict[int, LibraryLayer] = {}

    @classmethod
    def kernel_name(cls) -> str:
        """Return the name of this kernel in FlashInfer's registry."""
        return NAME

    def validate_init(self, bootstrap: Any, fleet_params: Any) -> None:
        """Raise ConfigError for sizes and options that no layer supports, before memory is allocated."""
        problem = self._problem(fleet_params, bootstrap.world_size, bootstrap.rank)  # raises
        check(self._stated.backend, self._stated.options, problem, equal_shares=True)
        if bootstrap.stream:
            raise ConfigError("bootstrap.stream", bootstrap.stream, "0: torch's current stream")

    def preprocess_weights(self, weights: Any, fleet_params: Any) -> ExpertWeights:
        """Convert a pack of weights to ExpertWeights. A pack in the precision's own format is not copied."""
        problem = self._here(fleet_params)
        stored = problem.formats.w
        if weights.w13_scale is None:
            for name, w in (("w13", weights.w13), ("w2", weights.w2)):
                if not w.is_floating_point() or w.dtype.itemsize == 1:  # what is stored with scales
                    expected = "torch.bfloat16 or torch.float32 in a pack without scales"
                    raise ArgumentError(f"weights.{name}.dtype", w.dtype, expected)
            made = ExpertWeights(weights.w13.bfloat16(), weights.w2.bfloat16())
            if stored.scaled:
                made.validate(replace(problem, precision="bf16"))
                made = made.quantized(problem)  # FlashInfer then frees the bf16 weights
        elif stored == E4M3_BLOCKS:
            scales = {"w13_scale": weights.w13_scale, "w2_scale": weights.w2_scale}
            made = ExpertWeights(weights.w13, weights.w2, **scales)
        elif stored == MXFP4:
            planes = problem.activation.planes
            pack = weights.w13, weights.w2, weights.w13_scale, weights.w2_scale
            made = ExpertWeights.from_mxfp4(*pack, planes=planes)
        else:
            expected = f"None: no pack has all scales of precision {problem.precision!r}"
            raise ArgumentError("weights.w13_scale", "given", expected)
        return self._checked(made, problem)

    def validate_transformed_weights(
        self, transformed_weights: Any, bootstrap: Any, fleet_params: Any
    ) -> None:
        """Raise ArgumentError unless the weights are ExpertWeights of these sizes."""
        if not isinstance(transformed_weights, ExpertWeights):
            found = type(transformed_weights).__name__
            raise ArgumentError("transformed_weights", found, "megamoe.ExpertWeights")
        self._checked(transformed_weights, self._here(fleet_params))

    def validate_forward(self, t: Any, fleet_params: Any, *, quantize_input: bool) -> None:
        """Run FlashInfer's checks of a call. If one rank raises, all do. The layer's own checks follow in the call."""
        rows = t.hidden_states, t.topk_ids, t.topk_weights, fleet_params
        options = {"quantize_input": quantize_input, "scales": t.scales}
        with together(self._layers.get(fleet_params.max_tokens_per_rank), self._group()):
            validate_mega_forward_inputs(*rows, top_k=self._stated.top_k, **options)

    def stage_inputs(self, t: Any, workspace: Workspace, *, quantize_input: bool) -> None:
        """Store the tensors of the next call, which the layer reads in place.

        If `quantize_input` is False, hidden_states are already quantized, with t.scales. All ranks raise ArgumentError
        if one has factors for the products (fc1_alpha, fc2_alpha, fc1_norm_const).
        """
        with together(workspace.layer):
            for name in _FACTORS:
                if getattr(t, name) is not None:
                    raise ArgumentError(name, "given", "None: weights have all their scales")
        scales = None if quantize_input else t.scales
        workspace.staged = t.hidden_states, t.topk_ids, t.topk_weights, scales

    def compute(
        self, workspace: Workspace, transformed_weights: ExpertWeights, *, output: Tensor | None
    ) -> Tensor:
        """Call the layer on the staged inputs and return y [T, H] bf16, in `output` if it is given. Collective."""
        with together(workspace.layer):
            if workspace.staged is None:
                raise ArgumentError("compute()", "called", "stage_inputs() before each compute()")
        (x, ids, scores, x_scale), workspace.staged = workspace.staged, None
        out = None if output is None else output[: x.shape[0]]
        with torch.no_grad():
            return workspace.layer(x, ids, scores, transformed_weights, out=out, x_scale=x_scale)

    def _allocate_workspace(self, fleet_params: Any) -> Workspace:
        group, stated = self._group(), (self._stated.backend, self._stated.options)
        with together(None, group):
            problem, weights = self._here(fleet_params), self._transformed_weights
            if weights is None:
                expected = "a pack, or transformed_weights, before a workspace"
                raise ConfigError("weights", None, expected)
        layer = LibraryLayer(problem, group, weights.w13.device, *stated)
        layer.prepare(weights)
        self._layers[problem.max_tokens] = layer
        return Workspace(layer)

    def _group(self) -> Any:
        return self.ep_comm_group if self.ep_world_size > 1 else None

    def _here(self, fleet_params: Any) -> Problem:
        return self._problem(fleet_params, self.ep_world_size, self.ep_rank)

    def _problem(self, fleet_params: Any, ep_size: int, rank: int) -> Problem:
        return Problem(
            hidden=fleet_params.token_hidden_size,
            intermediate=self._stated.intermediate_size,
            num_experts=fleet_params.num_experts,
            top_k=self._stated.top_k,
            ep_size=ep_size,
            rank=rank,
            max_tokens=fleet_params.max_tokens_per_rank,
            precision=self._stated.precision,
            activation=activation_by_name(self._stated.activation),
        )

    def _checked(self, weights: ExpertWeights, problem: Problem) -> ExpertWeights:
        weights.validate(problem)
        self._transformed_weights = weights
        return weights
