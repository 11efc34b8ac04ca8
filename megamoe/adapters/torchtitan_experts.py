"""Read torchtitan's experts for a layer: parameters and activation; reject what a layer does not support."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts
from torchtitan.models.gpt_oss.moe import swiglu as gpt_oss_swiglu

from megamoe.adapters.library_activations import candidates, matching
from megamoe.adapters.library_parameters import in_turn, joined, local, tie, weights_from
from megamoe.core.config import Activation, activation_by_name
from megamoe.core.errors import ConfigError
from megamoe.formats.weights import BF16_MASTERS, ExpertWeights


def activation_of(config: Any) -> Activation:
    """Return the activation of experts with this config. Raises ConfigError where it is none of ours."""
    if not isinstance(config, GptOssGroupedExperts.Config):
        return activation_by_name("swiglu")  # written out in GroupedExperts.forward
    limit = config.swiglu_limit

    def gate(columns: Tensor) -> Tensor:
        pairs = columns.unflatten(-1, (2, -1)).transpose(1, 2).flatten(1)
        return gpt_oss_swiglu(pairs, limit=limit)

    tried = candidates(True, [limit], [1.702])
    return matching(gate, tried, "GptOssGroupedExperts")


def weights_of(experts: Any, masters: tuple[torch.dtype, ...] = BF16_MASTERS) -> ExpertWeights:
    """Return the experts as a layer takes them: this rank's part, cast to bf16 unless it has a dtype of `masters`.

    w1 and w3 are copied unless w3 lies behind w1 in one tensor; the others are read in place.
    """
    biases: tuple[Tensor, ...] = ()
    first: tuple[Any, ...]
    if isinstance(experts, GptOssGroupedExperts):
        first, second = (experts.mlp1_weight_EGD,), experts.mlp2_weight_EDF
        w13, b13 = (in_turn(local(p)) for p in (first[0], experts.mlp1_bias_EG))
        biases = b13, local(experts.mlp2_bias_ED)
    else:
        first, second = (experts.w1_EFD, experts.w3_EFD), experts.w2_EDF
        w13 = joined([local(p) for p in first]).transpose(0, 1)
    return weights_from((w13, local(second)), (first, (second,)), biases, masters)


def check_class(config: Any) -> None:
    """Raise ConfigError for experts that torchtitan computes otherwise: quantized ones, say."""
    if type(config) not in (GroupedExperts.Config, GptOssGroupedExperts.Config):
        expected = "GroupedExperts.Config or GptOssGroupedExperts.Config"
        raise ConfigError("inner_experts", type(config).__qualname__, expected)


def check_modules(experts: Any) -> None:
    """Raise ConfigError for experts with modules or hooks in them, which a layer does not call."""
    for module in experts.modules():
        if type(module) not in (GroupedExperts, GptOssGroupedExperts):
            raise ConfigError("experts", type(module).__name__, "no modules in the experts")
        if module._forward_hooks or module._forward_pre_hooks:
            expected = "none: a layer does not call them; shard their block or the model"
            raise ConfigError("experts", f"hooks of {type(module).__name__}", expected)


def tie_experts(experts: Any) -> None:
    """Lay w3 behind w1, where they are read in place, if they are plain tensors."""
    if type(experts) is GroupedExperts and type(experts.w1_EFD.data) is Tensor:
        tie((experts.w1_EFD, experts.w3_EFD))
