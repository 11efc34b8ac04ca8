"""Tiny MoE layers and models of Megatron-Core on CPUs, where it has to be told that there is no GPU."""

from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.tensor_parallel import random
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe import experts, moe_utils
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig

from megamoe.adapters import megatron as adapter

HIDDEN, INTERMEDIATE, EXPERTS = 64, 48, 6
OPTIONS = {"backend": "staged", "max_tokens": 64}

# What Megatron does on a GPU, or with Transformer Engine, without saying so.
torch.cuda.current_device = lambda: torch.device("cpu")
random.CudaRNGStatesTracker.fork = lambda *_: nullcontext()
random._get_cuda_rng_state = lambda *_, **__: torch.empty(0)
random._set_cuda_rng_state = lambda *_, **__: None
moe_utils.te_general_gemm = None


def start(ep_size=1):
    parallel_state.initialize_model_parallel(expert_model_parallel_size=ep_size)


def config_of(**changes):
    ep_size = dist.get_world_size()
    sizes = {
        "num_layers": 2, "hidden_size": HIDDEN, "num_attention_heads": 4, "num_moe_experts": EXPERTS,
        "moe_router_topk": 2, "moe_ffn_hidden_size": INTERMEDIATE, "ffn_hidden_size": INTERMEDIATE,
        "gated_linear_unit": True, "activation_func": F.silu, "add_bias_linear": False, "bf16": True,
        "params_dtype": torch.bfloat16, "use_cpu_initialization": True, "bias_activation_fusion": False,
        "hidden_dropout": 0.0, "attention_dropout": 0.0, "masked_softmax_fusion": False,
        "transformer_impl": "local", "expert_model_parallel_size": ep_size, "init_method_std": 0.2,
    }  # fmt: skip
    return TransformerConfig(**sizes | changes)


class Linears(torch.nn.Module):
    """As Transformer Engine's grouped linear: weight0, weight1, ..."""

    def __init__(self, num_gemms, k, n, *, config, init_method, bias, skip_bias_add, **_):
        super().__init__()
        self.returns_bias = bias and skip_bias_add
        for i in range(num_gemms):
            weight = torch.nn.Parameter(torch.empty(n, k, dtype=config.params_dtype))
            init_method(weight.data)
            self.register_parameter(f"weight{i}", weight)
            if bias:
                drawn = torch.nn.Parameter(torch.randn(n, dtype=config.params_dtype) / 4)
                self.register_parameter(f"bias{i}", drawn)

    def forward(self, x, sizes):
        parts, biases = [], []
        for i, part in enumerate(x.split(sizes)):
            biases.append(getattr(self, f"bias{i}", None))
            added = None if self.returns_bias else biases[-1]
            parts.append(F.linear(part, getattr(self, f"weight{i}"), added))
        return torch.cat(parts), biases if self.returns_bias else None


def grouped_product(x, w, sizes, trans_b):
    assert not trans_b
    return torch.cat([part @ w[i] for i, part in enumerate(x.split(sizes.tolist()))])


def spec_of(kind):
    """Return Megatron's own spec with experts of a class; what these need of other packages is as above."""
    spec = get_moe_module_spec(use_te=False, num_experts=EXPERTS)
    if kind == "sequential":
        return spec
    module = {"te": experts.TEGroupedMLP, "grouped": experts.GroupedMLP}[kind]
    linears = MLPSubmodules(linear_fc1=Linears, linear_fc2=Linears) if kind == "te" else None
    submodules = MoESubmodules(
        experts=ModuleSpec(module=module, submodules=linears),
        shared_experts=spec.submodules.shared_experts,
    )
    return ModuleSpec(module=spec.module, submodules=submodules)


def grouped_gemm():
    """Stand for the package that GroupedMLP calls."""
    stand_in = SimpleNamespace(
        ops=SimpleNamespace(gmm=grouped_product), assert_grouped_gemm_is_available=lambda: None
    )
    return mock.patch.object(experts, "gg", stand_in)


def pair_of(kind="sequential", options=None, **changes):
    """Return Megatron's layer and ours with the same parameters."""
    torch.manual_seed(0)
    config = config_of(**changes)
    theirs = build_module(spec_of(kind), config=config)
    ours = build_module(adapter.replace(spec_of(kind), **OPTIONS | (options or {})), config=config)
    for name, p in theirs.named_parameters():
        if "bias" in name:
            torch.nn.init.normal_(p, std=0.3)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def results(layer, x, dy):
    """Return y and the gradients of x and all parameters, by name."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    y, bias = layer(x)
    assert bias is None
    y.backward(dy)
    gradients = {name: p.grad for name, p in layer.named_parameters()}
    return {"y": y.detach(), "x": x.grad} | gradients


def spread(layer):
    """Lay the experts as Megatron's distributed optimizer does: in one buffer, the last parameter first."""
    parameters = list(layer.experts.parameters())[::-1]
    buffer = torch.empty(sum(p.numel() for p in parameters), dtype=torch.bfloat16)
    for p, part in zip(parameters, buffer.split([p.numel() for p in parameters]), strict=True):
        part.copy_(p.data.flatten())
        p.data = part.view(p.shape)


def rows(length=9, batch=2, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(length, batch, HIDDEN, generator=generator).bfloat16()


def model_of(ours, options=None, **changes):
    spec = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False)
    if ours:
        spec = adapter.replace(spec, **OPTIONS | (options or {}))
    torch.manual_seed(0)
    return GPTModel(config_of(**changes), spec, vocab_size=128, max_sequence_length=16).bfloat16()


def losses_of(model, seed=0):
    """Return the losses of two sequences of 12 tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(128, (2, 12), generator=generator)
    hidden = torch.triu(torch.ones(12, 12, dtype=torch.bool), 1)[None, None]
    return model(ids, torch.arange(12).expand(2, 12), hidden, labels=ids).float()
