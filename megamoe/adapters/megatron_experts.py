"""Read Megatron's experts for a layer: parameters, activation, routes; reject what a layer does not support.

SequentialMLP and TEGroupedMLP have one parameter per expert, [2I, H] and [H, I]. They are moved into one tensor when
the layer is built, and read in place while they stay there (library_parameters.py), also in descending order.
GroupedMLP has [H, L*2I] and [L*I, H], which are transposed in every call.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.activations import quick_gelu
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.enums import CudaGraphScope
from megatron.core.transformer.moe.experts import GroupedMLP, SequentialMLP, TEGroupedMLP
from torch import Tensor

from megamoe.adapters.library_activations import candidates, matching
from megamoe.adapters.library_parameters import as_one, joined, tie, weights_from
from megamoe.core.config import Activation
from megamoe.core.errors import ConfigError
from megamoe.formats.weights import BF16_MASTERS, MASTERS, ExpertWeights

# Options of TransformerConfig that a layer does not follow: what they have to be instead.
_OFF = {
    "fp8": "None: precision= of the layer says how it multiplies",
    "fp4": "None: precision= of the layer says how it multiplies",
    "moe_pad_expert_input_to_capacity": "False: nothing is padded",
    "moe_permute_fusion": "False: nothing is permuted",
    "moe_shared_expert_overlap": "False: shared experts run before the routed ones",
    "moe_latent_size": "None",
    "use_te_activation_func": "False",
    "activation_func_fp8_input_store": "False",
    "use_kitchen": "False: products are of bf16 parameters",
    "quant_recipe": "None: products are of bf16 parameters",
    "overlap_moe_expert_parallel_comm": "False: dispatch and combine are part of the layer",
}
_RECOMPUTE = "without 'moe_act': 'moe' recomputes the whole layer"
_OFFLOAD = "without 'expert_fc1' and 'moe_act'"


def check_config(config: Any, pg_collection: Any) -> None:
    """Raise ConfigError for what a layer does not compute, or would compute otherwise."""
    for name in _OFF:
        _check_off(config, name)
    if config.moe_apply_probs_on_input and config.moe_router_topk != 1:
        expected = f"False with moe_router_topk {config.moe_router_topk}"
        raise ConfigError("moe_apply_probs_on_input", True, expected)
    if pg_collection.expt_tp.size() != 1:
        expected = "1: each rank holds whole experts"
        raise ConfigError("expert_tensor_parallel_size", pg_collection.expt_tp.size(), expected)
    if config.recompute_granularity == "selective" and "moe_act" in config.recompute_modules:
        raise ConfigError("recompute_modules", config.recompute_modules, _RECOMPUTE)
    offloaded = config.offload_modules or []
    if config.fine_grained_activation_offloading and {"expert_fc1", "moe_act"} & set(offloaded):
        raise ConfigError("offload_modules", offloaded, _OFFLOAD)
    whole = CudaGraphScope.full_iteration in config.cuda_graph_scope
    if config.cuda_graph_impl != "none" and not whole:
        expected = "'none', or cuda_graph_scope='full_iteration'"
        raise ConfigError("cuda_graph_impl", repr(config.cuda_graph_impl), expected)


def check_padding(config: Any) -> None:
    """Raise ConfigError where Megatron has turned padding on since: for decoding, by set_decode_expert_padding()."""
    _check_off(config, "moe_pad_expert_input_to_capacity")


def _check_off(config: Any, name: str) -> None:
    value = getattr(config, name, None)
    if value:
        raise ConfigError(name, value, _OFF[name])


def activation_of(config: Any) -> Activation:
    """Return the activation that gives what the experts' own function gives. Raises ConfigError where none does."""
    clamp, offset = config.activation_func_clamp_value, config.glu_linear_offset
    plain = clamp is None and not offset
    if not plain and not (config.gated_linear_unit and config.activation_func is quick_gelu):
        # Whether Megatron clamps here is up to bias_activation_fusion and the class of the experts.
        value = f"{clamp}, glu_linear_offset {offset}"
        expected = "None, and offset 0, for another activation than quick_gelu with gates"
        raise ConfigError("activation_func_clamp_value", value, expected)

    def gate(columns: Tensor) -> Tensor:
        if not config.gated_linear_unit:
            return config.activation_func(columns)
        first, second = columns.chunk(2, dim=-1)
        if clamp is not None:
            first, second = first.clamp(max=clamp), second.clamp(min=-clamp, max=clamp)
        return config.activation_func(first) * (second + offset)

    tried = candidates(config.gated_linear_unit, [clamp], [1.702])
    owner = getattr(config.activation_func, "__name__", str(config.activation_func))
    return matching(gate, tried, f"activation_func {owner}")


def check_experts(experts: Any) -> None:
    """Raise ConfigError for experts with other parameters than a layer reads: another class, low-rank ones."""
    kind = type(experts)
    if kind not in (SequentialMLP, TEGroupedMLP, GroupedMLP):
        expected = "SequentialMLP, TEGroupedMLP or GroupedMLP"
        raise ConfigError("experts", kind.__name__, expected)
    read = {id(p) for parameters in _parameters(experts).values() for p in parameters}
    for name, parameter in experts.named_parameters():
        if id(parameter) not in read:
            raise ConfigError(
                f"experts.{name}", "a parameter", f"none beside {kind.__name__}'s own"
            )


def check_types(experts: Any, masters: tuple[torch.dtype, ...]) -> None:
    """Raise ConfigError for parameters that a layer would have to convert. masters: dtypes of matrices."""
    for name, parameter in experts.named_parameters():
        allowed = MASTERS if "bias" in name else masters
        if parameter.dtype not in allowed or type(parameter.data) is not Tensor:
            value = f"{type(parameter.data).__name__} of {parameter.dtype}"
            expected = "a plain tensor of " + " or ".join(map(str, allowed))
            raise ConfigError(f"experts.{name}", value, expected)


def await_parameters(experts: Any) -> None:
    """Run the hooks that wait for parameters which Megatron's DDP gathers (overlap_param_gather).

    It hangs them on every module, and a layer reads parameters without a call of the modules that have them. Raises
    ConfigError for hooks of others.
    """
    for module in experts.modules():
        before, behind = module._forward_pre_hooks.values(), module._forward_hooks.values()
        for hook in (*before, *behind):
            if hook.__module__ != DistributedDataParallel.__module__:
                value = f"hooks of {type(module).__name__}: {hook.__qualname__}"
                raise ConfigError("experts", value, "no hooks: a layer does not call their modules")
        for hook in before:
            hook(module)


def routes_of(probs: Tensor, routing_map: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """probs: [T, E], routing_map: [T, E] bool -> topk_ids [T, K] int64, -1 where dropped, topk_weights [T, K].

    Nothing waits for the device. Experts are chosen by the map, since a chosen one may have probability 0, in
    ascending order, since the order of a token's experts is that of the sum. A token with more than K experts is a
    RuntimeError on CPUs and a device-side assertion on GPUs.
    """
    torch._assert_async(
        (routing_map.sum(-1) <= top_k).all(), f"tokens with more than {top_k} experts"
    )
    num_experts = routing_map.shape[-1]
    descending = torch.arange(num_experts, 0, -1, device=routing_map.device)
    chosen, ids = torch.where(routing_map, descending, 0).topk(top_k, dim=-1)
    absent = chosen == 0
    return ids.masked_fill(absent, -1), probs.gather(-1, ids).masked_fill(absent, 0)


def tie_experts(experts: Any) -> None:
    """Move the experts' matrices to where they are read in place."""
    if type(experts) is not GroupedMLP:
        parameters = _parameters(experts)
        tie(parameters["w13"])
        tie(parameters["w2"])


def lie_descending(experts: Any) -> bool:
    """Whether the matrices are read in place from the last expert on, as Megatron's distributed optimizer lays them."""
    if type(experts) is GroupedMLP or experts.num_local_experts == 1:
        return False
    parameters = _parameters(experts)
    return all(as_one(parameters[name][::-1]) is not None for name in ("w13", "w2"))


def turned_ids(topk_ids: Tensor, num_local_experts: int) -> Tensor:
    """topk_ids: [T, K], -1 where dropped -> the same where each rank counts its experts from the last to the first."""
    place = topk_ids % num_local_experts
    turned = topk_ids + (num_local_experts - 1 - 2 * place)
    return torch.where(topk_ids < 0, topk_ids, turned)


def adds_to_main_grad(experts: Any) -> bool:
    """Whether gradients of matrices are added to main_grad, as Megatron's own experts would."""
    return type(experts) is not GroupedMLP and bool(experts.config.gradient_accumulation_fusion)


def weights_of(
    experts: Any, *, adding: bool = False, descending: bool = False, copies: bool = False
) -> ExpertWeights:
    """Return the experts as a layer takes them.

    adding: gradients of matrices go to main_grad. descending: the last expert comes first. copies: FP8 copies are made
    of the matrices, bf16 or fp32, which live as long as the parameters stay what they are.
    """
    order = slice(None, None, -1 if descending else 1)
    parameters = {kind: of_kind[order] for kind, of_kind in _parameters(experts).items()}
    if type(experts) is GroupedMLP:
        held, hidden = experts.num_local_experts, experts.config.hidden_size
        w13 = experts.weight1.view(held, hidden, -1).transpose(1, 2).contiguous()
        w2 = experts.weight2.view(held, -1, hidden).transpose(1, 2).contiguous()
    else:
        w13, w2 = (joined(parameters[n], adding=adding) for n in ("w13", "w2"))
    # Without copies nobody reads the sources, and there are hundreds of parameters.
    sources = [parameters[n] if copies else () for n in ("w13", "w2")]
    biases = [torch.stack(parameters[n]) for n in ("b13", "b2") if n in parameters]
    return weights_from((w13, w2), sources, biases, MASTERS if copies else BF16_MASTERS)


def _parameters(experts: Any) -> dict[str, list[Any]]:
    """Return the parameters by what they are to a layer, in the order of experts."""
    if type(experts) is GroupedMLP:
        return {"w13": [experts.weight1], "w2": [experts.weight2]}
    kinds = {"w13": ("linear_fc1", "weight"), "w2": ("linear_fc2", "weight")}
    if experts.config.add_bias_linear:
        kinds |= {"b13": ("linear_fc1", "bias"), "b2": ("linear_fc2", "bias")}
    if type(experts) is SequentialMLP:
        return {
            kind: [getattr(getattr(expert, linear), name) for expert in experts.local_experts]
            for kind, (linear, name) in kinds.items()
        }
    numbers = range(experts.num_local_experts)
    return {
        kind: [getattr(getattr(experts, linear), f"{name}{i}") for i in numbers]
        for kind, (linear, name) in kinds.items()
    }
