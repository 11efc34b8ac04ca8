"""Arguments that name shapes of layers, and the problems of these shapes."""

import argparse
from dataclasses import replace

import megamoe
from bench.ranks import Rank
from megamoe.core.table import PRECISIONS, TRAINED
from megamoe.testing.shapes import SHAPES, Shape

EXPERTS_TRAINED = [name for name in TRAINED if not PRECISIONS[name].packed]


def add_shape_arguments(parser: argparse.ArgumentParser, default: str, local: bool = False) -> None:
    """Add --shape NAME..., and numbers that replace parts of it. local: also --local-experts-of, for local_shapes()."""
    parser.add_argument(
        "--shape", nargs="+", choices=list(SHAPES), default=[default], metavar="MODEL",
        help="one or more of " + ", ".join(SHAPES),
    )  # fmt: skip
    parser.add_argument("--hidden", type=int)
    parser.add_argument("--intermediate", type=int)
    parser.add_argument("--experts", type=int, dest="num_experts")
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--activation", help="swiglu, swiglu_oai, geglu, geglu_tanh or relu2")
    parser.add_argument("--bias", action="store_true", default=None)
    if local:
        parser.add_argument(
            "--local-experts-of", type=int, metavar="R",
            help="use the experts of one of R ranks, for fewer GPUs than R",
        )  # fmt: skip


def refuse_training(parser: argparse.ArgumentParser, precisions: list[str]) -> None:
    """End with a message if one of the precisions is for inference only."""
    for name in precisions:
        if not PRECISIONS[name].trains:
            parser.error(f"--precision {name} is for inference, expected {' or '.join(TRAINED)}")


def shapes_from(args: argparse.Namespace) -> list[Shape]:
    """Return the shapes that the arguments name."""
    names = ("hidden", "intermediate", "num_experts", "top_k", "activation", "bias")
    changed = {n: getattr(args, n) for n in names if getattr(args, n) is not None}
    if not changed:
        return [SHAPES[name] for name in args.shape]
    return [replace(SHAPES[name], name=f"{name}*", **changed) for name in args.shape]


def local_shapes(args: argparse.Namespace) -> list[Shape]:
    """Return the shapes, with the experts of one rank of several if that was asked for."""
    shapes, ranks = shapes_from(args), args.local_experts_of
    if ranks is None:
        return shapes
    for shape in shapes:
        if shape.num_experts // ranks < max(shape.top_k, 1):
            raise SystemExit(
                f"--local-experts-of {ranks}: {shape.name} has {shape.num_experts} experts, of which a token takes "
                f"{shape.top_k}"
            )
    return [
        replace(s, name=f"{s.name}/ep{ranks}", num_experts=s.num_experts // ranks) for s in shapes
    ]


def problem_of(shape: Shape, most: int, me: Rank, precision: str = "bf16") -> megamoe.Problem:
    """Return the layer of a shape over all ranks, for at most so many tokens of one."""
    return megamoe.Problem(
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        ep_size=me.size,
        rank=me.rank,
        max_tokens=most,
        precision=precision,
        activation=megamoe.activation_by_name(shape.activation),
        bias=shape.bias,
    )
