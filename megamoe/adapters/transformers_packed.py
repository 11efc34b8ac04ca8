"""Load GPT-OSS's MXFP4 checkpoints into transformers (5.23 on) with experts that stay packed.

transformers' own quantizer dequantizes these checkpoints, or turns them into the layout of a Triton kernel that has no
gradients. PackedQuantizer takes its place where megamoe computes the experts: parameters have the names, shapes and
bytes of the published tensors, so loading, saving and expert parallelism are transformers' own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ExpertsInterface, use_experts_implementation
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from megamoe.core.config import Activation
from megamoe.core.errors import ConfigError
from megamoe.core.table import MXFP4_GROUP


@use_experts_implementation(is_concatenated=False, has_bias=True)
class PackedExperts(nn.Module):
    """Hold GPT-OSS's experts in MXFP4. Biases are trained unless they are frozen.

    Args:
        config: transformers' GptOssConfig.

    Raises:
        ConfigError: A width is no multiple of 32.
    """

    _apply_gate = GptOssExperts._apply_gate

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_experts = num = config.num_local_experts
        self.hidden_size, self.intermediate_size = config.hidden_size, config.intermediate_size
        self.alpha, self.limit = config.swiglu_alpha, config.swiglu_limit
        self.adapters: dict[str, Any] = {}  # active in this call: see transformers_lora.py
        for name, rows, columns in (
            ("gate_up_proj", 2 * self.intermediate_size, self.hidden_size),
            ("down_proj", self.hidden_size, self.intermediate_size),
        ):
            if columns % MXFP4_GROUP:
                raise ConfigError(f"columns of {name}", columns, f"a multiple of {MXFP4_GROUP}")
            scales = num, rows, columns // MXFP4_GROUP
            for kind, shape in (("blocks", (*scales, MXFP4_GROUP // 2)), ("scales", scales)):
                stored = torch.empty(shape, dtype=torch.uint8)
                self.register_parameter(f"{name}_{kind}", nn.Parameter(stored, False))
            self.register_parameter(f"{name}_bias", nn.Parameter(torch.empty(num, rows)))

    # What activation_of() finds, without its comparison in each call.
    activation = property(lambda self: Activation("clamped_swiglu", self.alpha, self.limit, 1.0))
    # As transformers names the same tensors of DeepSeek-V4's FP4 experts.
    gate_up_proj = property(lambda self: self.gate_up_proj_blocks.flatten(2))
    down_proj = property(lambda self: self.down_proj_blocks.flatten(2))
    gate_up_proj_scale_inv = property(lambda self: self.gate_up_proj_scales)
    down_proj_scale_inv = property(lambda self: self.down_proj_scales)

    def forward(self, *_: Tensor) -> Tensor:
        """Raise ConfigError: transformers' eager experts cannot compute with packed weights."""
        name = getattr(self.config, "_experts_implementation", None)
        raise ConfigError("experts_implementation", repr(name), "megamoe's, for packed experts")


def pack_experts(model: PreTrainedModel, skipped: list[str] | None = None) -> int:
    """Replace GPT-OSS's experts by packed ones without values, on the devices of the old ones.

    Args:
        model: A GPT-OSS model.
        skipped: Names and patterns of modules that stay as they are. Default: none.

    Returns:
        The number of modules that were replaced.
    """
    found = [n for n, m in model.named_modules() if isinstance(m, GptOssExperts)]
    found = [name for name in found if should_convert_module(name, skipped)]
    for name in found:
        old: Any = model.get_submodule(name)
        with old.down_proj.device:
            packed = PackedExperts(old.config)
        packed.to(old.down_proj.dtype).train(old.training)  # biases
        model.set_submodule(name, packed)
    return len(found)


class PackedQuantizer(Mxfp4HfQuantizer):
    """Leave experts packed if megamoe computes them; otherwise do what transformers does."""

    packs = False
    computes: type  # the class of registered experts that take packed ones

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Wait for the model: which experts compute is not known yet."""

    def _process_model_before_weight_loading(
        self, model: Any, use_kernels: bool = False, **kwargs: Any
    ) -> None:
        config, stated = model.config, self.quantization_config
        ranks = getattr(config, "distributed_config", None)
        names = config._experts_implementation, getattr(ranks, "ep_implementation", None)
        ours = any(isinstance(ExpertsInterface().get(name), self.computes) for name in names)
        self.packs = ours and self.pre_quantized and not stated.dequantize
        if self.packs:
            pack_experts(model, stated.modules_to_not_convert)
            return
        super().validate_environment(device_map=kwargs.get("device_map"))
        super()._process_model_before_weight_loading(model, use_kernels, **kwargs)

    def update_parallel_plan(self, model: Any, plan: dict[str, str]) -> None:
        super().update_parallel_plan(model, plan)  # adds blocks and scales
        ends = tuple(f".experts.{name}" for name in self.serialized_names)
        for key in [k for k in plan if self.packs and k.endswith(ends)]:
            del plan[key]

    def get_load_operations(self) -> dict[str, Any]:
        return {} if self.packs else super().get_load_operations()

    def get_state_dict_and_metadata(self, model: Any) -> tuple[Any, dict[str, Any]]:
        return (None, {}) if self.packs else super().get_state_dict_and_metadata(model)

    @property
    def is_trainable(self) -> bool:
        """Return True for packed experts: gradients pass through them."""
        return self.packs or super().is_trainable
