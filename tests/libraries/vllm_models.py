"""Tiny MoE layers of vLLM on CPUs: its own methods make, load and run their experts."""

from types import SimpleNamespace

import torch
from stand_ins import stand_in

stand_in("torchvision")

import vllm.platforms  # noqa: E402
from vllm.platforms.cpu import CpuPlatform  # noqa: E402

vllm.platforms._current_platform = CpuPlatform()  # the wheel is that for GPUs

from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.distributed import parallel_state  # noqa: E402
from vllm.forward_context import set_forward_context  # noqa: E402
from vllm.model_executor.layers.activation import SiluAndMulWithClamp  # noqa: E402
from vllm.model_executor.layers.fused_moe.activation import MoEActivation  # noqa: E402
from vllm.model_executor.layers.fused_moe.config import (  # noqa: E402
    FusedMoEConfig,
    FusedMoEParallelConfig,
    RoutingMethodType,
)
from vllm.model_executor.layers.fused_moe.expert_map_manager import (  # noqa: E402
    determine_expert_map,
)
from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory  # noqa: E402
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (  # noqa: E402
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.quantization import fp8, modelopt, mxfp4  # noqa: E402
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (  # noqa: E402
    compressed_tensors_moe_w4a4_nvfp4 as compressed_nvfp4,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (  # noqa: E402
    compressed_tensors_moe_w8a8_fp8 as compressed_fp8,
)
from vllm.v1.worker.workspace import init_workspace_manager  # noqa: E402

from megamoe.core.config import Problem  # noqa: E402
from megamoe.formats.mxfp4 import plain_scales as plain_mxfp4  # noqa: E402
from megamoe.formats.nvfp4 import plain_scales as plain_nvfp4  # noqa: E402
from megamoe.testing import make_weights  # noqa: E402

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, MAX_TOKENS = 256, 128, 6, 3, 64
init_workspace_manager(torch.device("cpu"))
parallel_state._TP = SimpleNamespace(world_size=1, rank_in_group=0)
config = VllmConfig()


def problem_of(rank=0, size=1, precision="bf16", **changes):
    return Problem(
        HIDDEN, INTERMEDIATE, EXPERTS, changes.pop("top_k", TOP_K), ep_size=size, rank=rank,
        max_tokens=MAX_TOKENS, precision=precision, **changes,
    )  # fmt: skip


def config_of(rank=0, size=1, **changes):
    """Return what vLLM knows of a layer. changes: of FusedMoEConfig and FusedMoEParallelConfig."""
    parallel = {
        "tp_size": 1, "pcp_size": 1, "dp_size": size, "ep_size": size, "tp_rank": 0, "pcp_rank": 0, "dp_rank": rank,
        "ep_rank": rank, "sp_size": 1, "use_ep": size > 1, "all2all_backend": "allgather_reducescatter",
        "enable_eplb": False,
    }  # fmt: skip
    for name in parallel.keys() & changes.keys():
        parallel[name] = changes.pop(name)
    local = EXPERTS // size
    return FusedMoEConfig(**{
        "num_experts": EXPERTS, "experts_per_token": TOP_K, "hidden_dim": HIDDEN, "intermediate_size": INTERMEDIATE,
        "num_local_experts": local, "num_logical_experts": EXPERTS, "activation": MoEActivation.SILU,
        "device": "cpu", "routing_method": RoutingMethodType.Renormalize, "in_dtype": torch.bfloat16,
        "moe_parallel_config": FusedMoEParallelConfig(**parallel), "max_num_tokens": MAX_TOKENS,
        "elastic_ep_max_dp_size": size,  # as vLLM says, elastic or not
    } | changes)  # fmt: skip


class MoE(torch.nn.Module):
    """What vLLM's methods take for a layer: its config, parameters, and how it is called."""

    def __init__(
        self, moe, precision="bf16", placement="linear", block=(128, 128), strategies=("channel", "token")
    ):  # fmt: skip
        super().__init__()
        parallel = moe.moe_parallel_config
        self.moe_config, self.activation = moe, moe.activation
        self.global_num_experts, self.apply_router_weight_on_input = moe.num_experts, False
        self.swiglu_limit = moe.swiglu_limit
        self.swiglu_alpha, self.swiglu_beta = moe.swiglu_alpha, moe.swiglu_beta
        placed = determine_expert_map(parallel.ep_size, parallel.ep_rank, EXPERTS, placement)
        self.local_num_experts, self.expert_map, _ = placed
        with set_current_vllm_config(config):
            if precision == "bf16":
                self.method = UnquantizedFusedMoEMethod(moe)
            elif precision == "bf16xmxfp4":
                self.method = mxfp4.GptOssMxfp4MoEMethod(moe)
            elif precision == "fp8xmxfp4":
                self.method = mxfp4.Mxfp4MoEMethod(moe)
            elif precision == "bf16xnvfp4" and strategies:
                quantized = modelopt.ModelOptNvFp4Config("NVFP4", True)
                self.method = modelopt.ModelOptNvFp4FusedMoE(quantized, moe)
            elif precision == "bf16xnvfp4":
                self.method = compressed_nvfp4.CompressedTensorsW4A4Nvfp4MoEMethod(moe)
            elif precision == "fp8_channel":  # as FP8_DYNAMIC checkpoints say it
                weights, rows = (
                    compressed_fp8.QuantizationArgs(num_bits=8, type="float", strategy=s, dynamic=d)
                    for s, d in zip(strategies, (False, True), strict=True)
                )
                method = compressed_fp8.CompressedTensorsW8A8Fp8MoEMethod
                self.method = method(weights, rows, moe)
            else:
                quantized = fp8.Fp8Config(True, "dynamic", weight_block_size=list(block))
                self.method = fp8.Fp8MoEMethod(quantized, self)
        sizes = HIDDEN, moe.intermediate_size_per_partition, torch.bfloat16
        with set_current_vllm_config(config):
            self.method.create_weights(self, self.local_num_experts, *sizes, weight_loader=print)

    def _expert_routing_tables(self):
        return None

    def load(self, weights):
        """Copy them into the parameters, then have vLLM process these."""
        turns = self.moe_config.activation is MoEActivation.SWIGLUOAI
        matrices = {"w13": weights.w13, "w2": weights.w2}
        packed = "_packed" * hasattr(self, "w13_weight_packed")
        named = {f"{name}_weight{packed}": w for name, w in matrices.items()}
        if weights.w13.dtype == torch.uint8:
            for name, w in matrices.items():
                scale, planes = getattr(weights, f"{name}_scale"), 1 + (name == "w13")
                rows, width = w.shape[1], 2 * w.shape[2]
                if hasattr(self, "w13_weight_scale_2") or packed:
                    made = plain_nvfp4(scale, planes, rows // planes, width)
                    named[f"{name}_weight_scale"] = made[0].view(torch.float8_e4m3fn)
                    outer = made[1] if name == "w13" else made[1][:, 0]
                    end = "global_scale" if packed else "scale_2"
                    named[f"{name}_weight_{end}"] = 1 / outer if packed else outer
                    getattr(self, f"{name}_input_{'global_' * bool(packed)}scale").data.fill_(1)
                else:
                    named[f"{name}_weight_scale"] = plain_mxfp4(
                        scale, planes, rows // planes, width
                    )
        elif weights.w13_scale is not None:
            end = "weight_scale" if hasattr(self, "w13_weight_scale") else "weight_scale_inv"
            named |= {f"w13_{end}": weights.w13_scale, f"w2_{end}": weights.w2_scale}
        if weights.b13 is not None:
            named |= {"w13_bias": weights.b13, "w2_bias": weights.b2}
        for name, value in named.items():
            if turns and name.startswith("w13"):
                value = value.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
            getattr(self, name).data.copy_(value)
        self.method.process_weights_after_loading(self)
        return self

    @torch.inference_mode()
    def forward(self, x, topk_ids, topk_weights):
        return self.method.apply(self, x, topk_weights, topk_ids, None, None)


def layer_of(rank=0, size=1, precision="bf16", seed=0, **changes):
    """Return a layer of vLLM on one rank, its weights loaded."""
    moe = config_of(rank, size, **changes)
    problem = problem_of(rank, size, precision, bias=moe.has_bias)
    return MoE(moe, precision).load(make_weights(problem, seed=seed))


def tokens(count=20, seed=1, top_k=TOP_K):
    """Return x, topk_ids (int32, some of them -1), topk_weights."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(count, HIDDEN, generator=draw).bfloat16()
    topk_weights, topk_ids = torch.rand(count, EXPERTS, generator=draw).topk(top_k)
    topk_ids[3:4], topk_ids[5:6, 1:] = -1, -1
    return x, topk_ids.int(), topk_weights


def parallel(rank, tensor):
    """Return the config of two ranks that share experts, by tensor or data parallelism, and make vLLM's groups."""
    ranks = {"tensor_parallel_size": 2} if tensor else {"data_parallel_size": 2}
    made = VllmConfig(parallel_config=ParallelConfig(
        enable_expert_parallel=True, distributed_executor_backend="external_launcher",
        data_parallel_rank=0 if tensor else rank, **ranks,
    ))  # fmt: skip
    made.scheduler_config.max_num_batched_tokens = MAX_TOKENS
    parallel_state._TP, parallel_state._EP = None, None
    parallel_state._WORLD = parallel_state.init_world_group([0, 1], rank, "gloo")
    with set_current_vllm_config(made):
        parallel_state.initialize_model_parallel(2 if tensor else 1, backend="gloo")
    return made


class Routes(torch.nn.Module):
    """A layer as vLLM's models make theirs, with its runner, but for the routes, which are given."""

    def __init__(self, whole, weights, shared=None, **options):
        super().__init__()
        self.whole, self.routes = whole, None
        with set_current_vllm_config(whole):
            self.runner = FusedMoEFactory(
                num_experts=EXPERTS, top_k=TOP_K, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE,
                params_dtype=torch.bfloat16, custom_routing_function=lambda *_, **__: self.routes[::-1],
                prefix=f"layers.{len(whole.compilation_config.static_all_moe_layers)}.mlp.experts",
                shared_experts=shared, **options,
            )  # fmt: skip
        experts = self.runner.routed_experts
        experts.w13_weight.data.copy_(weights.w13)
        experts.w2_weight.data.copy_(weights.w2)
        experts.quant_method.process_weights_after_loading(experts)

    @torch.inference_mode()
    def forward(self, x, *routes, everywhere=None):
        """everywhere: tokens of each rank of data parallelism."""
        self.routes = routes
        with set_forward_context(
            None, self.whole, num_tokens=len(x), num_tokens_across_dp=everywhere
        ):
            return self.runner(x.clone(), x.new_zeros(len(x), EXPERTS))


def share(group):
    """Say which ranks share the experts, as vLLM does."""
    parallel_state._EP = SimpleNamespace(device_group=group)


def silu(gate_up, limit=1e9, alpha=1.0, beta=0.0):
    """Apply vLLM's own activation, in torch."""
    with set_current_vllm_config(config):
        return SiluAndMulWithClamp(limit, alpha, beta, compile_native=False).forward_native(gate_up)


def dense(call, activation=silu, precision="bf16", on_input=False, weights=None, **changes):
    """Return y in fp32 of all experts' weights, dequantized; nothing else is rounded."""
    x, topk_ids, topk_weights = call
    problem = problem_of(precision=precision, **changes)
    weights = weights or make_weights(problem)
    plain = weights.dense(problem, torch.float32)
    y = torch.zeros(len(x), HIDDEN)
    for token in range(len(x)):
        for expert, weight in zip(topk_ids[token].tolist(), topk_weights[token], strict=True):
            if expert < 0:
                continue
            row = x[token] * weight.bfloat16() if on_input else x[token]
            gate_up = plain.w13[expert].float() @ row.float()
            if weights.b13 is not None:
                gate_up = gate_up + weights.b13[expert].bfloat16().float()
            out = plain.w2[expert].float() @ activation(gate_up)
            if weights.b2 is not None:
                out = out + weights.b2[expert].bfloat16().float()
            y[token] += out if on_input else weight * out
    return y
