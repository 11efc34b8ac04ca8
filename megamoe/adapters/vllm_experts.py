"""Implement the classes that vLLM expects of experts and of their prepare and finalize steps, with megamoe layers."""

from __future__ import annotations

from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch import Tensor
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed import parallel_state
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.prepare_finalize.passthrough import (
    PassThroughPrepareAndFinalize,
)
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kFp8Dynamic128Sym,
    kFp8DynamicTokenSym,
    kFp8Static128BlockSym,
    kFp8StaticChannelSym,
    kMxfp4Static,
    kNvfp4Dynamic,
    kNvfp4Static,
)
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import current_platform

from megamoe.adapters.library_layer import LibraryLayer, LibraryLayers, together
from megamoe.adapters.library_parameters import in_turn
from megamoe.backends.select import resolve
from megamoe.core.config import ACTIVATIONS, Activation, Problem
from megamoe.core.errors import ArgumentError, ConfigError
from megamoe.core.table import SCALE_GROUP
from megamoe.formats.weights import ExpertWeights

_PRECISIONS = {
    (None, None): "bf16",
    (kFp8Static128BlockSym, kFp8Dynamic128Sym): "fp8",
    (kFp8StaticChannelSym, kFp8DynamicTokenSym): "fp8_channel",
    (kMxfp4Static, None): "bf16xmxfp4",
    (kMxfp4Static, kFp8Dynamic128Sym): "fp8xmxfp4",
    (kNvfp4Static, None): "bf16xnvfp4",
    (kNvfp4Static, kNvfp4Dynamic): "bf16xnvfp4",  # rows are not rounded to FP4, as by Marlin
}
_PLAIN = {
    MoEActivation.GELU: "geglu",
    MoEActivation.GELU_TANH: "geglu_tanh",
    MoEActivation.SWIGLUOAI: "swiglu_oai",  # gate and up rows in turn
}
_CLAMPED = (MoEActivation.SILU, MoEActivation.SWIGLUOAI_UNINTERLEAVE)


class Layers(LibraryLayers):
    """The layers of this process, one for all MoE layers of one problem. backend, options: of megamoe.Layer."""

    def __init__(self, backend: str, options: dict[str, Any]) -> None:
        super().__init__()
        self.backend, self.options = backend, options

    def of(self, problem: Problem, device: torch.device) -> LibraryLayer:
        """Return the layer over vLLM's expert-parallel group. Collective where it is made."""
        group = None if problem.ep_size == 1 else parallel_state.get_ep_group().device_group
        key = problem, group, device
        if key not in self:
            self[key] = LibraryLayer(*key, self.backend, self.options)
        return self[key]


class Experts(mk.FusedMoEExpertsModular):
    """vLLM's experts in a megamoe layer: tokens of this rank in, their finished sums out.

    MoE layers of equal sizes share one, and its window. Calls are collective over the expert-parallel group.
    """

    layers = Layers("auto", {})  # install() sets another
    packed = ""  # precision of FP4 experts

    @classmethod
    def of(cls, weight_key: Any, activation_key: Any) -> type[Experts]:
        """Return the class for a scheme that is supported."""
        precision = _PRECISIONS[weight_key, activation_key]
        return type("Experts", (cls,), {"packed": precision}) if "fp4" in precision else cls

    def __init__(self, moe_config: Any, quant_config: Any) -> None:
        super().__init__(moe_config, quant_config)
        block = quant_config.block_shape  # compressed-tensors' key says 128x128 of any
        if block is not None and list(block) != [SCALE_GROUP] * 2:
            raise ConfigError("block shape of weights", block, f"{[SCALE_GROUP] * 2}")
        precision = self.packed or "bf16"
        if quant_config.quant_dtype is not None and not self.packed:
            precision = "fp8_channel" if quant_config.per_act_token_quant else "fp8"
        self._problem = _problem_of(moe_config, precision, self._activation())
        self._placed = False
        self._in_turn = moe_config.activation is MoEActivation.SWIGLUOAI

    def _activation(self) -> Activation:
        config, kind = self.activation_config, self.moe_config.activation
        if kind in _PLAIN:
            return ACTIVATIONS[_PLAIN[kind]]
        if kind is MoEActivation.SILU and config.clamp_limit is None:
            return ACTIVATIONS["swiglu"]
        if kind is MoEActivation.SILU:
            return Activation("clamped_swiglu", limit=float(config.clamp_limit))
        if config.clamp_limit is None:
            raise ConfigError("swiglu_limit", None, f"a number, for {kind}")
        limit, alpha, beta = (float(v) for v in (config.clamp_limit, config.alpha, config.beta))
        return Activation("clamped_swiglu", alpha=alpha, limit=limit, up_offset=beta)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Bring FP4 scales into the kernel's order, once: the layer's parameters are replaced."""
        if not self.packed:
            return
        config = self.quant_config
        given = layer.w13_weight, layer.w2_weight
        scales = layer.w13_weight_scale, layer.w2_weight_scale
        if "mxfp4" in self.packed:
            made = ExpertWeights.from_mxfp4(*given, *scales, interleaved=self._in_turn)
        else:
            outer = config.g1_alphas, config.g2_alphas
            made = ExpertWeights.from_nvfp4(*given, scales, outer, interleaved=self._in_turn)
        replace_parameter(layer, "w13_weight_scale", made.w13_scale)
        replace_parameter(layer, "w2_weight_scale", made.w2_scale)
        config._w1.scale, config._w2.scale = layer.w13_weight_scale, layer.w2_weight_scale

    @staticmethod
    def is_supported_config(
        cls: type[mk.FusedMoEExperts],
        moe_config: Any,
        weight_key: Any,
        activation_key: Any,
        activation_format: Any,
    ) -> tuple[bool, str | None]:
        """Return whether a layer can compute this, and if not, why."""
        given = moe_config, weight_key, activation_key, activation_format
        supported, reason = mk.FusedMoEExpertsModular.is_supported_config(cls, *given)
        if not supported:
            return False, reason
        if moe_config.in_dtype != torch.bfloat16:
            return False, f"activations are {moe_config.in_dtype}, not torch.bfloat16"
        whole = get_current_vllm_config_or_none()
        if whole is not None and whole.parallel_config.enable_elastic_ep:
            return False, "the ranks may change (elastic expert parallelism)"
        turns = moe_config.activation is MoEActivation.SWIGLUOAI
        if turns and weight_key in (kFp8Static128BlockSym, kFp8StaticChannelSym):
            return False, "gate and up rows in turn share FP8 scales (swigluoai)"
        if moe_config.skip_final_all_reduce:
            return False, "the model adds up what ranks return (skip_final_all_reduce)"
        try:
            _problem_of(moe_config, _PRECISIONS[weight_key, activation_key])
        except ConfigError as error:
            return False, str(error)
        return True, None

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def _supports_current_device() -> bool:
        here = current_platform.is_cuda() and current_platform.is_device_capability_family(90)
        return here or resolve(Experts.layers.backend) not in ("auto", "mega")

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return (weight_key, activation_key) in _PRECISIONS

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        return activation in _PLAIN or activation in _CLAMPED

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        config = moe_parallel_config  # tp_size: the number of ranks that share an expert
        return config.tp_size == 1 and not config.use_batched_activation_format

    @staticmethod
    def _supports_batch_invariance() -> bool:
        # Asked for by name, since "auto" may be staged.
        return resolve(Experts.layers.backend) == "mega"

    @property
    def expects_unquantized_inputs(self) -> bool:
        return True

    def finalize_weight_and_reduce_impl(self) -> Any:
        return TopKWeightAndReduceNoOP()

    def workspace_shapes(self, M: int, N: int, K: int, *_: Any) -> tuple[tuple[int, ...], ...]:
        return (0,), (0,), (M, K)

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: Tensor | None,
        *_: Any,
        apply_router_weight_on_input: bool,
        **__: Any,
    ) -> None:
        """Write the weighted sums of hidden_states [T, H] bf16 to output [T, H]. Collective.

        w1: [L, 2I, H], w2: [L, H, I], bf16, e4m3 or packed, read where they are. topk_ids: [T, K], of all experts; -1
        adds nothing. expert_map: which experts this rank has; looked at once.
        Raises ArgumentError for what does not fit, and for weights on the input of several experts of a token, on all
        ranks.
        """
        problem = self._problem
        layer = self.layers.of(problem, hidden_states.device)
        with together(layer):
            if activation is not self.moe_config.activation:
                raise ArgumentError("activation", activation, f"{self.moe_config.activation}")
            if global_num_experts != problem.num_experts:
                expected = f"{problem.num_experts}"
                raise ArgumentError("global_num_experts", global_num_experts, expected)
            if self.post_gemm2_hook is not None:
                raise ArgumentError("post_gemm2_hook", "set", "None: a layer sums an expert's rows")
            if apply_router_weight_on_input and topk_ids.shape[1] != 1:
                found = f"True with top_k {topk_ids.shape[1]}"
                raise ArgumentError("apply_router_weight_on_input", found, "top_k 1")
            if not self._placed:
                _check_placement(problem, expert_map)
                self._placed = True
        b13, b2 = (None if b is None else b.float() for b in (self.w1_bias, self.w2_bias))
        if self._in_turn:
            w1, b13 = in_turn(w1), None if b13 is None else in_turn(b13)
        weights = ExpertWeights(w1, w2, b13, b2, self.w1_scale, self.w2_scale)
        out = output if hidden_states.dtype == torch.bfloat16 else None  # the error is to name x
        layer(hidden_states, topk_ids, topk_weights.float(), weights, out=out)


class PrepareAndFinalize(PassThroughPrepareAndFinalize):
    """Leaves tokens where they are. A rank without tokens brings one without routes: vLLM would not make the call."""

    def prepare(
        self,
        a1: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        num_experts: int,
        expert_map: Tensor | None,
        apply_router_weight_on_input: bool,
        *_: Any,
        **__: Any,
    ) -> mk.PrepareResultType:
        if apply_router_weight_on_input and topk_ids.shape[1] == 1:  # others: see Experts.apply()
            a1 = a1 * topk_weights.to(a1.dtype)
            topk_weights = torch.ones_like(topk_weights)
        if not a1.shape[0]:
            a1 = a1.new_zeros(1, a1.shape[1])
            topk_ids = topk_ids.new_full((1, topk_ids.shape[1]), -1)
            topk_weights = topk_weights.new_zeros(topk_ids.shape)
        return a1, None, None, topk_ids, topk_weights

    def finalize(self, output: Tensor, fused_expert_output: Tensor, *_: Any, **__: Any) -> None:
        """Copy, where the layer has not written to output itself."""
        if output.data_ptr() != fused_expert_output.data_ptr():
            output.copy_(fused_expert_output[: output.shape[0]])


def _problem_of(
    moe_config: Any, precision: str, activation: Activation = ACTIVATIONS["swiglu"]
) -> Problem:
    parallel = moe_config.moe_parallel_config
    return Problem(
        hidden=moe_config.hidden_dim,
        intermediate=moe_config.intermediate_size_per_partition,
        num_experts=moe_config.num_experts,
        top_k=moe_config.experts_per_token,
        ep_size=parallel.ep_size,
        rank=parallel.ep_rank,
        max_tokens=moe_config.max_num_tokens,
        precision=precision,
        activation=activation,
        bias=moe_config.has_bias,
    )


def _check_placement(problem: Problem, expert_map: Tensor | None) -> None:
    """Raise ConfigError unless this rank has the experts that a layer takes it to have. Waits for the device."""
    if expert_map is None:
        return
    begin, count = problem.expert_begin(), problem.num_local_experts()
    expected = torch.full((problem.num_experts,), -1)
    expected[begin : begin + count] = torch.arange(count)
    if expert_map.tolist() != expected.tolist():
        held = [e for e, place in enumerate(expert_map.tolist()) if place >= 0]
        raise ConfigError(
            "expert_map",
            f"that of experts {held}",
            f"{begin}..{begin + count - 1} in order: linear placement",
        )
