"""Tiny models with FP8 and FP4 experts of transformers, and with what these stand for in bf16."""

import copy
import json
from functools import partial

import pytest
import torch
import transformers
from hf_models import experts_of, model_of
from huggingface_hub import save_torch_state_dict
from transformers.integrations import finegrained_fp8

from megamoe.formats.mxfp4 import dequantize_mxfp4, plain_scales, quantize_mxfp4

HIDDEN, INTERMEDIATE = 256, 128
SIZES = {"hidden_size": HIDDEN, "moe_intermediate_size": INTERMEDIATE, "num_experts": 4}
# e4m3 rounds by 2.6 % in the mean, and roundings add as squares: x counts twice (gate and up), h once.
ROUNDED_ROWS = 0.05


def quantized(model, **options):
    """Return a copy whose experts are transformers' FP8Experts, of no values yet."""
    model = copy.deepcopy(model)
    config = transformers.FineGrainedFP8Config(**options)
    keep = [".*self_attn", "lm_head", ".*mlp.gate"]
    finegrained_fp8.replace_with_fp8_linear(model, keep, config, pre_quantized=True)
    for module in experts_of(model):
        module.to_empty(device="cpu")
    model.set_experts_implementation("megamoe")
    return model, config


@torch.no_grad()
def fp8_pair(**options):
    """Return a model with FP8 experts, quantized by transformers, and one with what they stand for in bf16."""
    dense = model_of("Qwen3Moe", "eager", **SIZES)
    model, config = quantized(dense, **options)
    to_fp8 = finegrained_fp8.Fp8Quantize(type("Quantizer", (), {"quantization_config": config}))
    to_bf16 = finegrained_fp8.Fp8Dequantize(None)
    for module, own in zip(experts_of(model), experts_of(dense), strict=True):
        for name in ("gate_up_proj", "down_proj"):
            made = to_fp8._quantize_one(name, getattr(own, name).detach())
            for key, value in made.items():
                getattr(module, key).data.copy_(value)
            scale = made[f"{name}_scale_inv"]
            numbers = to_bf16._dequantize_one(made[name], scale, output_dtype=torch.bfloat16)
            getattr(own, name).data.copy_(numbers)
    return model, dense


@torch.no_grad()
def fp4_pair():
    """Return the same in FP4, as DeepSeek-V4 has it."""
    pytest.importorskip("transformers", minversion="5.23")  # older ones read another setting
    dense = model_of("Qwen3Moe", "eager", **SIZES)
    model, _ = quantized(dense, scale_fmt="ue8m0", expert_dtype="fp4")
    for module, own in zip(experts_of(model), experts_of(dense), strict=True):
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(own, name).detach()
            packed, scales = quantize_mxfp4(weight)
            weight.copy_(dequantize_mxfp4(packed, scales))
            plain = plain_scales(scales, 1, *weight.shape[1:])
            getattr(module, name).data.copy_(packed.view(torch.int8))
            getattr(module, f"{name}_scale_inv").data.view(torch.uint8).copy_(plain)
    return model, dense


def written_packed(folder, **sizes):
    """Write a random GPT-OSS as it is published: several files, names, bytes and quantization_config."""
    # Every token takes every expert, so that no rounding changes a route.
    sizes = {"intermediate_size": 96, "num_experts_per_tok": 6} | sizes
    model = model_of("GptOss", "eager", **sizes)
    state = model.state_dict()
    for name in [n for n in state if n.endswith(("gate_up_proj", "down_proj"))]:
        weight = state.pop(name).transpose(1, 2)
        packed, scales = quantize_mxfp4(weight)
        state[f"{name}_blocks"] = packed.unflatten(-1, (-1, 16))
        state[f"{name}_scales"] = plain_scales(scales, 1, *weight.shape[1:]).clone()
    save_torch_state_dict(state, folder, max_shard_size=40_000)
    config = json.loads(model.config.to_json_string(use_diff=False))
    keep = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": keep}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


PAIRS = {
    "fp8": fp8_pair,
    "fp8, powers of two": partial(fp8_pair, scale_fmt="ue8m0"),
    "fp4": fp4_pair,
}
