"""Tiny FP8 experts as SGLang builds them for Hopper, and its own calls of them, on CPUs."""

import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from unittest import mock

import torch
from compressed_tensors.quantization import QuantizationArgs
from stand_ins import stand_in

stand_in("torchvision")
if "deep_gemm" not in sys.modules:  # SGLang asks it for the number of SMs besides
    sys.modules["deep_gemm"] = ModuleType("deep_gemm")
    sys.modules["deep_gemm"].get_num_sms = lambda: 132

from sglang.srt import runtime_context  # noqa: E402
from sglang.srt.environ import envs  # noqa: E402
from sglang.srt.layers.moe import MoeRunnerConfig, mega_moe, mega_moe_sm90  # noqa: E402
from sglang.srt.layers.moe.fused_moe_native import fused_moe_forward_native  # noqa: E402
from sglang.srt.layers.moe.moe_runner.deep_gemm import DeepGemmRunnerCore  # noqa: E402, F401
from sglang.srt.layers.moe.utils import MoeA2ABackend, get_flags  # noqa: E402
from sglang.srt.layers.quantization.compressed_tensors import schemes  # noqa: E402
from sglang.srt.layers.quantization.modelopt_quant import ModelOptNvFp4FusedMoEMethod  # noqa: E402
from sglang.srt.layers.quantization.w8a8_fp8 import W8A8FP8MoEMethod  # noqa: E402
from sglang.srt.plugins import GENERAL_PLUGINS_GROUP  # noqa: E402, F401

from megamoe.core.config import Problem  # noqa: E402
from megamoe.formats.mxfp4 import plain_scales as plain_mxfp4  # noqa: E402
from megamoe.formats.nvfp4 import plain_scales as plain_nvfp4  # noqa: E402
from megamoe.testing import make_weights  # noqa: E402

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, MAX_TOKENS = 256, 128, 6, 3, 64
SIZES = {"hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "top_k": TOP_K}
mega_moe._device_sm = mega_moe_sm90._device_sm = 90


def problem_of(rank=0, size=1, precision="fp8"):
    return Problem(
        HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, ep_size=size, rank=rank, max_tokens=MAX_TOKENS,
        precision=precision,
    )  # fmt: skip


def experts_of(rank=0, size=1, seed=0):
    """Return what a FusedMoE of SGLang holds when its checkpoint is loaded, on one rank."""
    weights = make_weights(problem_of(rank, size), seed=seed)
    experts = torch.nn.Module()
    named = {
        "w13_weight": weights.w13, "w13_weight_scale_inv": weights.w13_scale,
        "w2_weight": weights.w2, "w2_weight_scale_inv": weights.w2_scale,
    }  # fmt: skip
    for name, value in named.items():
        setattr(experts, name, torch.nn.Parameter(value, requires_grad=False))
    experts.num_experts = EXPERTS
    return flagged(experts)


def flagged(experts, **config):
    experts.moe_runner_config = MoeRunnerConfig(**config)
    experts._mega_moe_weights_built = experts._mega_moe_nvfp4 = experts._mega_moe_w4a4 = False
    return experts


def args_of(strategy, **others):
    return QuantizationArgs(num_bits=8, type="float", strategy=strategy, **others)


METHODS = {  # of experts by channel
    "compressed-tensors": lambda: schemes.CompressedTensorsW8A8Fp8MoE(
        args_of("channel"), args_of("token", dynamic=True)
    ),
    "w8a8_fp8": lambda: W8A8FP8MoEMethod(None),
}


def chosen(backend):
    """Say what --moe-a2a-backend does."""
    return mock.patch.object(get_flags().moe, "a2a_backend", MoeA2ABackend(backend))


def by_channel(method, rank=0, size=1, seed=0, backend="megamoe", **config):
    """Return experts by channel, made, loaded and finished by SGLang's own method."""
    problem = problem_of(rank, size, "fp8_channel")
    weights, experts = make_weights(problem, seed=seed), flagged(torch.nn.Module(), **config)
    method.create_weights(
        experts, problem.num_local_experts(), HIDDEN, INTERMEDIATE, torch.bfloat16
    )
    for name, value in (("w13", weights.w13), ("w2", weights.w2)):
        getattr(experts, f"{name}_weight").data.copy_(value)
        scale = getattr(experts, f"{name}_weight_scale").data
        scale.copy_(getattr(weights, f"{name}_scale").view(scale.shape))
    experts.num_experts = EXPERTS
    with chosen(backend):
        method.process_weights_after_loading(experts)
    return experts


def built(rank=0, size=1, seed=0):
    """Return experts after SGLang's own function has built them."""
    experts = experts_of(rank, size, seed)
    mega_moe_sm90.build_sm90_mega_moe_experts_weights(experts)
    return experts


def packed(precision, rank=0, size=1, **config):
    """Return FP4 experts as SGLang has them when loading ends, and after its own functions have built them."""
    problem = problem_of(rank, size, precision)
    weights, experts = make_weights(problem), flagged(torch.nn.Module(), **config)
    for name, planes, rows, width in (
        ("w13", 2, INTERMEDIATE, HIDDEN),
        ("w2", 1, HIDDEN, INTERMEDIATE),
    ):
        scale, given = getattr(weights, f"{name}_scale"), {"weight": getattr(weights, name)}
        if precision == "fp8xmxfp4":  # int8, and powers of two in fp32
            plain = plain_mxfp4(scale, planes, rows, width).view(torch.float8_e8m0fnu)
            given = {"weight": given["weight"].view(torch.int8), "weight_scale_inv": plain.float()}
        else:
            plain, outer = plain_nvfp4(scale, planes, rows, width)
            given["weight_scale"] = plain.view(torch.float8_e4m3fn)
            given["weight_scale_2"] = outer if planes == 2 else outer[:, 0]
        for end, value in given.items():
            kept = torch.nn.Parameter(value.clone(), requires_grad=False)
            setattr(experts, f"{name}_{end}", kept)
    experts.num_experts = EXPERTS
    return experts


def build(experts):
    """End the loading of FP4 experts as SGLang's methods do it with --moe-a2a-backend megamoe."""
    if hasattr(experts, "w13_weight_scale_inv"):
        mega_moe.build_mega_moe_experts_weights(experts)
    else:
        ModelOptNvFp4FusedMoEMethod._build_mega_moe_weights(None, experts)
    return experts


def tokens(count=20, seed=1):
    """Return x, topk_ids (int32, some of them -1), topk_weights."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(count, HIDDEN, generator=draw).bfloat16()
    topk_weights, topk_ids = torch.rand(count, EXPERTS, generator=draw).topk(TOP_K)
    topk_ids[3:4], topk_ids[5:6, 1:] = -1, -1
    return x, topk_ids.int(), topk_weights


@contextmanager
def group_of(group):
    """Say which ranks share the experts, as SGLang's runtime does."""
    parallel = SimpleNamespace(moe_ep_group=SimpleNamespace(device_group=group))
    cap = envs.SGLANG_OPT_DEEPGEMM_MEGA_MOE_NUM_MAX_TOKENS_PER_RANK
    told = mock.patch.object(runtime_context, "get_parallel", return_value=parallel)
    with told, cap.override(MAX_TOKENS):
        yield


def run(experts, call, group, **options):
    """Return y of SGLang's own function of routed experts."""
    x, topk_ids, topk_weights = call
    with group_of(group), torch.inference_mode():
        return mega_moe.run_mega_routed_experts(
            experts, x, topk_ids, topk_weights, num_tokens=len(x), **SIZES | options
        )


def dense(call, clamp=None, factor=1.0, precision="fp8"):
    """Return y in fp32 of all experts' weights, dequantized; nothing else is rounded."""
    x, topk_ids, topk_weights = call
    problem = problem_of(precision=precision)
    plain = make_weights(problem).dense(problem, torch.float32)
    y = torch.zeros(len(x), HIDDEN)
    for token in range(len(x)):
        for expert, weight in zip(topk_ids[token].tolist(), topk_weights[token], strict=True):
            if expert < 0:
                continue
            gate, up = (plain.w13[expert] @ x[token].float()).chunk(2)
            if clamp is not None:
                gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
            h = torch.nn.functional.silu(gate) * up
            y[token] += weight * factor * (plain.w2[expert] @ h)
    return y


def native(call):
    """Return y of SGLang's own torch function, in fp32, of the dequantized weights."""
    x, topk_ids, topk_weights = call
    plain = make_weights(problem_of()).dense(problem_of(), torch.float32)
    layer = SimpleNamespace(
        w13_weight=plain.w13,
        w2_weight=plain.w2,
        moe_runner_config=SimpleNamespace(
            apply_router_weight_on_input=False, activation="silu", swiglu_limit=None,
            gemm1_alpha=None, gemm1_clamp_limit=None,
        ),
    )  # fmt: skip
    ids, weights = topk_ids.long().clamp(min=0), topk_weights.masked_fill(topk_ids < 0, 0.0)
    given = SimpleNamespace(hidden_states=x.float(), topk_output=(weights, ids, None))
    return fused_moe_forward_native(layer, given).hidden_states
