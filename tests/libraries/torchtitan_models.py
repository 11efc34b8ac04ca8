"""Tiny MoE modules and models of torchtitan on CPUs, where it has to be told that there is no GPU."""

from functools import partial

import spmd_types as spmd
import torch
import torch.distributed as dist
import torchtitan.tools.utils as utils
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

utils.device_type, utils.device_module = "cpu", torch.cpu  # before others import them

from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.config.override import OverrideConfig, apply_overrides  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.distributed.utils import get_spmd_context, set_spmd_backend  # noqa: E402
from torchtitan.models import qwen3  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.common.config_utils import make_routed_experts_config  # noqa: E402
from torchtitan.models.common.embedding import Embedding  # noqa: E402
from torchtitan.models.common.feed_forward import FeedForward  # noqa: E402
from torchtitan.models.common.linear import Linear  # noqa: E402
from torchtitan.models.common.moe import MoE, RoutedExperts, TokenChoiceTopKRouter  # noqa: E402
from torchtitan.models.common.moe_sharding import set_moe_sharding_config  # noqa: E402
from torchtitan.models.common.rope import CosSinRoPE  # noqa: E402
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher  # noqa: E402
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts  # noqa: E402
from torchtitan.models.qwen3.parallelize import parallelize_qwen3  # noqa: E402
from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config  # noqa: E402

HIDDEN, INTERMEDIATE, EXPERTS = 64, 48, 6
OVERRIDE = "megamoe.adapters.torchtitan.megamoe"
OPTIONS = {"backend": "staged", "max_tokens": 64}
WEIGHTS = ("w1_EFD", "w2_EDF", "w3_EFD", "mlp1_weight_EGD", "mlp1_bias_EG", "mlp2_weight_EDF",
           "mlp2_bias_ED", "weight")  # fmt: skip
INIT = dict.fromkeys(WEIGHTS, partial(nn.init.normal_, std=0.2))


def linear(k, n):
    return Linear.Config(in_features=k, out_features=n, param_init=INIT)


def moe_config(kind="dense", *, top_k=2, limit=4.7, **router):
    """limit: far from most pre-activations, since torchtitan rounds them to bf16 before it clamps."""
    sizes = {"dim": HIDDEN, "hidden_dim": INTERMEDIATE, "num_experts": EXPERTS}
    if kind == "gpt-oss":
        experts = RoutedExperts.Config(
            inner_experts=GptOssGroupedExperts.Config(**sizes, param_init=INIT, swiglu_limit=limit),
            token_dispatcher=AllToAllTokenDispatcher.Config(num_experts=EXPERTS, top_k=top_k),
        )
    else:
        experts = make_routed_experts_config(
            **sizes, top_k=top_k, param_init=INIT, comm_backend="standard"
        )
    gate = linear(HIDDEN, EXPERTS)
    config = MoE.Config(
        num_experts=EXPERTS,
        routed_experts=experts,
        router=TokenChoiceTopKRouter.Config(num_experts=EXPERTS, top_k=top_k, gate=gate, **router),
    )
    if kind == "shared":
        w1, w2 = linear(HIDDEN, 32), linear(32, HIDDEN)
        config.shared_experts = FeedForward.Config(w1=w1, w2=w2, w3=linear(HIDDEN, 32))
    return config


def overridden(config, **options):
    """Apply the override as torchtitan does. Returns the config, and what torchtitan says of it."""
    said = apply_overrides(OverrideConfig(imports=[(OVERRIDE, OPTIONS | options)]), config)
    return config, said


def pair_of(kind="dense", dtype=torch.bfloat16, options=None, **changes):
    """Return torchtitan's MoE and ours with the same parameters."""
    theirs = moe_config(kind, **changes).build()
    ours = overridden(moe_config(kind, **changes), **options or {})[0].build()
    torch.manual_seed(0)
    for module in (theirs, ours):
        module.to(dtype)
        module.init_states()
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def rows(length=9, seed=1, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, length, HIDDEN, generator=generator).to(dtype)


def results(module, x, dy):
    """Return y and the gradients of x and all parameters, by name."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    y = module(x)
    y.backward(dy)
    return {"y": y.detach(), "x": x.grad} | {n: p.grad for n, p in module.named_parameters()}


def qwen3_config(ours, *, wide=False, **options):
    """wide: larger experts' and routers' weights than torchtitan draws, which have larger gradients."""
    layers = qwen3._build_qwen3_moe_layers(
        fuse_qkv=True, n_layers=2, dim=HIDDEN, n_heads=4, n_kv_heads=2, head_dim=16,
        moe_hidden_dim=INTERMEDIATE, num_experts=EXPERTS, top_k=2, attn_backend="flex",
        rope=CosSinRoPE.Config(dim=16, max_seq_len=64, theta=1e4), moe_comm_backend="standard",
    )  # fmt: skip
    for layer in layers:  # the others want a GPU
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
        if wide:
            layer.moe.routed_experts.inner_experts.param_init = INIT
            layer.moe.router.gate.param_init = INIT
    config = qwen3.Qwen3Model.Config(
        vocab_size=128,
        dim=HIDDEN,
        norm=qwen3._qwen3_norm(HIDDEN),
        tok_embeddings=Embedding.Config(
            num_embeddings=128, embedding_dim=HIDDEN, param_init=qwen3._EMBEDDING_INIT
        ),
        lm_head=Linear.Config(in_features=HIDDEN, out_features=128, param_init=qwen3._LINEAR_INIT),
        layers=layers,
    )
    return overridden(config, **options)[0] if ours else config


def dims_of(backend, ep, ranks=None, tp=1):
    """ranks: all there are, ep unless it is said; tp of them share a sequence."""
    set_spmd_backend(backend)
    ranks = ranks or ep
    dims = ParallelDims(
        dp_replicate=1, dp_shard=ranks // tp, cp=1, tp=tp, pp=1, ep=ep, world_size=ranks,
        spmd_backend=backend,
    )  # fmt: skip
    dims.build_mesh()
    return dims


def parallel_model(ours, dims, *, fsdp, layers=2, **options):
    """Return a Qwen3-MoE as torchtitan's trainer makes it."""
    config = qwen3_config(ours, wide=True, **options)
    config.layers = config.layers[:layers]
    set_qwen3_sharding_config(config, enable_sp=dims.tp > 1, enable_ep=True)
    with torch.device("meta"):
        model = config.build()
    parallelism = ParallelismConfig(spmd_backend=dims.spmd_backend, expert_parallel_degree=dims.ep)
    model = parallelize_qwen3(
        model,
        parallel_dims=dims,
        training=TrainingConfig(),
        parallelism=parallelism,
        compile_config=CompileConfig(enable=False),
        ac_config=None,
        dump_folder="",
        skip_dp=not fsdp,
    )
    for module in model.modules():
        if hasattr(module, "set_force_sum_reduction_for_comms"):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
    model.to_empty(device="cpu")
    torch.manual_seed(dist.get_rank())  # else ranks would draw the same experts
    with torch.no_grad():
        model.init_weights()
    return model


def fill(model):
    """Draw parameters by their names: the same ones, however they are sharded."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            drawn = torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name)))
            drawn = 1 + 0.05 * drawn if "norm" in name else 0.2 * drawn
            p.to_local().copy_(distribute_tensor(drawn, p.device_mesh, p.placements).to_local())
    return model


def parallel_pair(kind, dims):
    """Return torchtitan's MoE and ours over the ranks of `dims`, with the same parameters on each."""
    pair = []
    for ours in (False, True):
        config = moe_config(kind)
        if ours:
            overridden(config)
        names = dict.fromkeys(WEIGHTS, spmd.R)
        set_moe_sharding_config(config, enable_ep=True, enable_sp=False, expert_param_layout=names)
        torch.manual_seed(0)
        module = config.build().bfloat16()
        module.init_states()
        module.parallelize(dims)  # each rank keeps its part of the same experts
        pair.append(module)
    return pair


def loss_of(model, dims=None, seed=0, length=12):
    ids = torch.randint(128, (2, length), generator=torch.Generator().manual_seed(seed))
    if dims is None:
        return nn.functional.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten())
    with get_spmd_context(parallel_dims=dims, spmd_typechecking=False)():
        y = model(ids)
        y = y.full_tensor() if isinstance(y, DTensor) else y
        loss = nn.functional.cross_entropy(y.flatten(0, 1).float(), ids.flatten())
        loss.backward()
    return loss
