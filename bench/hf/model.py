"""A Qwen3-MoE from a configuration, loaded on one rank or many with megamoe's experts or transformers' own."""

import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bench.demo.model import VOCABULARY
from bench.ranks import Rank
from megamoe.adapters.library_parameters import local

OURS = "megamoe"


@dataclass(frozen=True)
class Sizes:
    """Of a model, and of the text that it learns from."""

    hidden: int
    intermediate: int
    experts: int
    top_k: int
    layers: int
    heads: int
    context: int
    batch: int  # sequences of a rank
    vocabulary: int = VOCABULARY
    head_size: int | None = None  # None: hidden / heads
    groups: int = 2  # heads that share a key

    def config(self) -> transformers.Qwen3MoeConfig:
        made: Any = transformers.Qwen3MoeConfig  # its fields are no arguments to a type checker
        return made(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.hidden,
            moe_intermediate_size=self.intermediate,
            num_experts=self.experts,
            num_experts_per_tok=self.top_k,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads // self.groups,
            head_dim=self.head_size or self.hidden // self.heads,
            max_position_embeddings=4 * self.context,
            norm_topk_prob=True,
            router_aux_loss_coef=0.01,
            initializer_range=0.5 * self.hidden**-0.5,  # 0.022 at 512
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=None,
        )


CPU_SIZES = Sizes(64, 48, 8, 2, layers=2, heads=4, context=64, batch=8)
GPU_SIZES = Sizes(512, 256, 32, 4, layers=8, heads=8, context=512, batch=16)  # 107 M parameters
WIDE_SIZES = Sizes(  # Qwen3-30B's, 8.1 B parameters in 12 layers
    *(2048, 768, 128, 8, 12, 32, 2048, 4), vocabulary=151_936, head_size=128, groups=8
)


@contextmanager
def saved_model(sizes: Sizes, seed: int, me: Rank) -> Iterator[Path]:
    """Give the folder of a bf16 model with random weights, written by rank 0. Collective; of ranks of one host."""
    name: list[str | None] = [tempfile.mkdtemp(prefix="megamoe-hf-") if me.is_first else None]
    dist.broadcast_object_list(name, src=0)
    folder = Path(str(name[0]))
    try:
        if me.is_first:
            torch.manual_seed(seed)
            model = transformers.AutoModelForCausalLM.from_config(
                sizes.config(), dtype=torch.bfloat16
            )
            model.save_pretrained(folder)
        dist.barrier()
        yield folder
    finally:
        dist.barrier()
        if me.is_first:
            shutil.rmtree(folder)


def load(folder: Path, experts: str, me: Rank) -> Any:
    """Return the model of a folder. Collective.

    experts: a name that begins with OURS, of a registered adapter, or an experts_implementation of transformers. On
    several ranks dense parameters are sharded by FSDP2, experts spread over the ranks; tokens go to transformers' own
    experts by all_to_all.
    """
    options: dict[str, Any] = {"experts_implementation": experts}
    if me.size > 1:
        from transformers.distributed import DistributedConfig

        ours = experts.startswith(OURS)
        exchange = experts if ours else "all_to_all"
        options["distributed_config"] = DistributedConfig(
            fsdp_size=me.size, ep_size=me.size, ep_implementation=exchange
        )
        if ours:
            del options["experts_implementation"]
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, **options
    )
    return (model if me.size > 1 else model.to(me.device)).train()


def parts(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Return the parameters of the experts, of their routers, and the others."""
    found: dict[str, list[nn.Parameter]] = {"experts": [], "routers": [], "dense": []}
    for name, parameter in model.named_parameters():
        part = "experts" if ".experts." in name else "routers" if ".mlp.gate." in name else "dense"
        found[part].append(parameter)
    return found


@torch.no_grad()
def snapshot(model: nn.Module) -> list[Tensor]:
    """Return this rank's parts of all parameters, on the CPU."""
    return [local(p).detach().to("cpu", copy=True) for p in model.parameters()]


@torch.no_grad()
def restore(model: nn.Module, values: list[Tensor]) -> None:
    for parameter, value in zip(model.parameters(), values, strict=True):
        local(parameter).copy_(value)
        parameter.grad = None


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Return all of every parameter, on the CPU. Collective."""
    # It warns that this takes two collectives.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    found = {}
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        found[name] = (value.full_tensor() if isinstance(value, DTensor) else value).cpu()
    return found


def routers(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if type(m).__name__.endswith("TopKRouter")]


@contextmanager
def routes_kept(model: nn.Module) -> Iterator[list[Tensor]]:
    """Collect the expert ids that every router chooses."""
    kept: list[Tensor] = []
    hooks = [r.register_forward_hook(lambda m, a, out: kept.append(out[2])) for r in routers(model)]
    try:
        yield kept
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def routes_given(model: nn.Module, ids: list[Tensor]) -> Iterator[None]:
    """Let every router take given ids; their weights are still its own, so that it is trained."""
    found = routers(model)
    if len(found) != len(ids):
        raise RuntimeError(f"{len(found)} routers, given ids for {len(ids)}")

    def hook_for(chosen: Tensor) -> Callable[..., Any]:
        def hook(module: nn.Module, arguments: Any, out: Any) -> Any:
            weights = out[0].softmax(-1, dtype=torch.float32).gather(-1, chosen)
            weights = weights / weights.sum(-1, keepdim=True)
            return out[0], weights.to(out[1].dtype), chosen

        return hook

    hooks = [r.register_forward_hook(hook_for(i)) for r, i in zip(found, ids, strict=True)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
