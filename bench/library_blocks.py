"""tools/library_blocks.py: a MoE block of another library with its own experts and with ours, in turns, compared."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bench.ranks import Rank
from bench.sweep import compare_all
from bench.timing import Contender, Timer, worst
from megamoe.core.table import PRECISIONS
from megamoe.testing.compare import compare
from megamoe.testing.shapes import Shape

# Of y and of each gradient, relative. The library rounds what it adds up to bf16 as well; FP8: docs/numerics.md.
LIMITS = {False: 3e-2, True: 0.15}


@dataclass(frozen=True)
class Block:
    """What is compared: `run` takes x [T, H]; `close` frees what it holds."""

    name: str
    scaled: bool  # FP8
    module: nn.Module
    run: Callable[[Tensor], Tensor]
    close: Callable[[], None] = lambda: None


def fill(module: nn.Module) -> None:
    """Give every parameter the values that its name and shape determine."""
    generator = torch.Generator(next(module.parameters()).device)
    with torch.no_grad():
        for number, (_, parameter) in enumerate(sorted(module.named_parameters())):
            generator.manual_seed(number)
            parameter.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)


def with_ours(
    args: argparse.Namespace, theirs: str, module_of: Callable[[str], nn.Module]
) -> list[Block]:
    """module_of: name of experts that transformers knows -> the block's module. Theirs, and ours in each precision."""
    import megamoe.adapters.transformers as adapter

    def block(name: str, experts: str, scaled: bool, close: Callable[[], None]) -> Block:
        module = module_of(experts)
        return Block(name, scaled, module, lambda x: module(x[None])[0], close)

    found = [block(f"transformers {theirs}", theirs, False, lambda: None)]
    for precision in args.precision:
        options = {"precision": precision, "max_tokens": args.tokens, "backend": args.backend}
        ours = adapter.register(f"megamoe_{precision}", **options)
        scaled = PRECISIONS[precision].x.scaled
        found.append(block(f"megamoe {precision}", f"megamoe_{precision}", scaled, ours.close))
    return found


def of_transformers(shape: Shape, me: Rank, args: argparse.Namespace) -> list[Block]:
    """Return Qwen3-MoE's block with transformers' experts and with ours."""
    import transformers
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = transformers.Qwen3MoeConfig(
        hidden_size=shape.hidden,
        moe_intermediate_size=shape.intermediate,
        num_experts=shape.num_experts,
        num_experts_per_tok=shape.top_k,
        norm_topk_prob=True,
    )

    theirs = "grouped_mm" if me.device.type == "cuda" else "eager"
    if me.size > 1:
        return over_ranks(shape, theirs, me, args)

    def module_of(experts: str) -> nn.Module:
        own = type(config)(**config.to_dict())
        own._experts_implementation = experts
        with torch.device(me.device):
            module = Qwen3MoeSparseMoeBlock(own).to(torch.bfloat16)
        fill(module)
        return module

    return with_ours(args, theirs, module_of)


def over_ranks(shape: Shape, theirs: str, me: Rank, args: argparse.Namespace) -> list[Block]:
    """Return the block of a model with one layer, its experts spread over the ranks by transformers or by us."""
    import transformers

    from bench.hf.model import Sizes, load, saved_model

    sizes = Sizes(
        shape.hidden, shape.intermediate, shape.num_experts, shape.top_k,
        layers=1, heads=max(2, shape.hidden // 128), context=args.tokens, batch=1,
    )  # fmt: skip
    transformers.utils.logging.disable_progress_bar()

    def module_of(experts: str) -> nn.Module:
        layer: Any = load(folder, experts, me).model.layers[0]
        layer.unshard()  # the router; nothing calls the layer, whose hooks would
        block: nn.Module = layer.mlp
        return block

    with saved_model(sizes, 0, me) as folder:
        return with_ours(args, theirs, module_of)


def of_torchtitan(shape: Shape, me: Rank, args: argparse.Namespace) -> list[Block]:
    """Return torchtitan's MoE with its experts and with ours, over the ranks as its trainer spreads them."""
    import torchtitan.tools.utils as utils

    if me.device.type == "cpu":
        utils.device_type, utils.device_module = "cpu", torch.cpu  # before others import them
    import spmd_types
    from torchtitan.config.override import OverrideConfig, apply_overrides
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.utils import set_spmd_backend
    from torchtitan.models.common.config_utils import make_routed_experts_config
    from torchtitan.models.common.linear import Linear
    from torchtitan.models.common.moe import MoE, TokenChoiceTopKRouter
    from torchtitan.models.common.moe_sharding import set_moe_sharding_config

    import megamoe.adapters.torchtitan as adapter

    def config() -> Any:
        gate = Linear.Config(
            in_features=shape.hidden,
            out_features=shape.num_experts,
            param_init={"weight": nn.init.normal_},
        )
        initial = dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), nn.init.normal_)
        return MoE.Config(
            num_experts=shape.num_experts,
            routed_experts=make_routed_experts_config(
                dim=shape.hidden,
                hidden_dim=shape.intermediate,
                num_experts=shape.num_experts,
                top_k=shape.top_k,
                param_init=initial,
                comm_backend="standard",
            ),
            router=TokenChoiceTopKRouter.Config(
                num_experts=shape.num_experts, top_k=shape.top_k, gate=gate
            ),
        )

    dims = None
    if me.size > 1:
        backend = "partial_dtensor"  # its other one's dispatcher has no CPU
        set_spmd_backend(backend)
        one = dict.fromkeys(("dp_replicate", "cp", "tp", "pp"), 1)
        dims = ParallelDims(
            **one, dp_shard=me.size, ep=me.size, world_size=me.size, spmd_backend=backend
        )
        dims.build_mesh()

    def block(name: str, given: Any, scaled: bool) -> Block:
        if dims is not None:
            whole = dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD", "weight"), spmd_types.R)
            set_moe_sharding_config(
                given, enable_ep=True, enable_sp=False, expert_param_layout=whole
            )
        with torch.device(me.device):
            module = given.build().to(torch.bfloat16)
            module.init_states()
        fill(module)
        if dims is not None:
            module.parallelize(dims)  # a rank keeps its part of the same experts
        ours = name.startswith("megamoe")
        close = (lambda: adapter.close(module)) if ours else (lambda: None)
        return Block(name, scaled, module, lambda x: module(x[None])[0], close)

    found = [block("torchtitan", config(), False)]
    for precision in args.precision:
        options = {"max_tokens": args.tokens, "precision": precision, "backend": args.backend}
        given = config()
        apply_overrides(
            OverrideConfig(imports=[("megamoe.adapters.torchtitan.megamoe", options)]), given
        )
        found.append(block(f"megamoe {precision}", given, PRECISIONS[precision].x.scaled))
    return found


LIBRARIES = {"transformers": of_transformers, "torchtitan": of_torchtitan}


def step(block: Block, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """Return y and every gradient, by name."""
    x = x.detach().requires_grad_()
    block.module.zero_grad()
    with torch.enable_grad():
        y = block.run(x)
        y.backward(dy)
    named = {n: p.grad for n, p in block.module.named_parameters() if p.grad is not None}
    return {n: local(t) for n, t in {"y": y.detach(), "x": x.grad, **named}.items()}


def local(tensor: Any) -> Any:
    """Return this rank's part."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def differences(theirs: dict[str, Tensor], ours: dict[str, Tensor]) -> dict[str, float]:
    """Return the relative errors; inf for a gradient that only one has."""
    names = theirs.keys() | ours.keys()
    both = theirs.keys() & ours.keys()
    return {n: compare(ours[n], theirs[n]).relative if n in both else float("inf") for n in names}


def compare_blocks(shape: Shape, me: Rank, args: argparse.Namespace) -> bool:
    """Time and compare the blocks of one shape; return whether ours compute what the library's does."""
    blocks = LIBRARIES[args.library](shape, me, args)
    timer, good = Timer(me.device, args.samples), True
    torch.manual_seed(me.rank)
    x = torch.randn(args.tokens, shape.hidden, device=me.device).bfloat16()
    dy = torch.randn_like(x)
    told = {blocks[0]: ""}
    wanted = step(blocks[0], x, dy)
    for block in blocks[1:]:
        found, limit = differences(wanted, step(block, x, dy)), LIMITS[block.scaled]
        name = max(found, key=lambda n: found[n])
        furthest = worst(found[name], me.device)
        told[block] = f"{name} {furthest:.1e} (limit {limit:g})"
        good &= furthest <= limit
    del wanted
    forwards = [Contender(b.name, partial(lambda b, _: b.run(x), b)) for b in blocks]
    steps = [Contender(b.name, partial(lambda b, _: step(b, x, dy), b)) for b in blocks]
    forward_us, step_us = timer.medians(forwards), timer.medians(steps)
    title = f"{shape.name}, T = {args.tokens}, us"
    me.print(f"{title:30}{'forward':>20}{'step':>20}   furthest from the library's")
    for block, *both in zip(blocks, forward_us, step_us, strict=True):
        theirs = forward_us[0], step_us[0]
        cells = [f"{us:.0f} ({than / us:.2f}x)" for us, than in zip(both, theirs, strict=True)]
        me.print(f"{block.name:30}{cells[0]:>20}{cells[1]:>20}   {told[block]}")
        block.close()
    return good


def worker(me: Rank, args: argparse.Namespace) -> int:
    return compare_all(me, args, compare_blocks)
