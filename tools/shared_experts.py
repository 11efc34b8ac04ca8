#!/usr/bin/env python3
"""Time a layer with a shared expert beside it and inside it (megamoe.SharedExperts), forward, and compare their y.

    python tools/shared_experts.py --shape dsv3 --precision fp8 --tokens 8 64 512 8192           on all GPUs
    python tools/shared_experts.py --shape qwen3-30b --shared 3072

beside is the routed layer, then the shared expert in one stream: by torch in bf16, and by a layer of its own with one
expert, in the precision given. inside is one launch. Cool, aligned, in turns, as tools/latency_sweep.py does it; the
largest of the ranks' medians. Exit code 1 when the ways disagree by more than roundings explain.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from common import Rank, add_launch_arguments, add_shape_arguments, header, launch, shapes_from
from latency_sweep import Timer
from sweep_contenders import Call
from torch import Tensor

from megamoe import ExpertWeights, Layer, Problem, SharedExperts
from megamoe.core.config import PRECISIONS, activation_by_name
from megamoe.core.table import SCALE_GROUP
from megamoe.testing import compare, make_inputs, make_weights
from megamoe.testing.shapes import Shape

# Of y, relative: of bf16 sums, of other bits of h; where FP8's blocks are others, or one side is bf16
SAME, OTHER = {False: 1e-2, True: 2e-2}, {False: 1e-2, True: 0.1}


@dataclass(frozen=True)
class Way:
    """One way to compute routed and shared experts: x -> y."""

    name: str
    run: Callable[[Tensor], Tensor]


def problem_of(shape: Shape, me: Rank, args: argparse.Namespace) -> Problem:
    return Problem(
        shape.hidden,
        shape.intermediate,
        shape.num_experts,
        shape.top_k,
        ep_size=me.size,
        rank=me.rank,
        max_tokens=max(args.tokens),
        precision=args.precision,
        activation=activation_by_name(shape.activation),
        bias=shape.bias,
    )


def by_torch(problem: Problem, whole: ExpertWeights) -> Callable[[Tensor], Tensor]:
    """Return the shared expert as torch computes it in bf16."""

    def run(x: Tensor) -> Tensor:
        gate_up = torch.nn.functional.linear(x, whole.w13)
        if whole.b13 is not None:
            gate_up = gate_up + whole.b13
        if problem.activation.kind == "swiglu":
            gate, up = gate_up.chunk(2, dim=-1)
            h = torch.nn.functional.silu(gate) * up
        else:
            h = problem.activation(gate_up)
        y = torch.nn.functional.linear(h.bfloat16(), whole.w2)
        return y if whole.b2 is None else (y + whole.b2).bfloat16()

    return run


def compare_ways(shape: Shape, me: Rank, args: argparse.Namespace) -> bool:
    """Time the ways of one shape for each number of tokens; return whether they agree."""
    problem = problem_of(shape, me, args)
    shared = SharedExperts(problem, args.shared or shape.intermediate, device=me.device)
    width = shared.count * shape.intermediate
    one = replace(problem, intermediate=width, num_experts=1, top_k=1, ep_size=1, rank=0)
    masters = make_weights(one, seed=1, device=me.device, quantize=False)
    whole = ExpertWeights(**{n: t[0] for n, t in masters.named().items()})
    routed = make_weights(problem, device=me.device, quantize=False)
    every = shared.join(routed, shared.parts(whole)).quantized(shared.problem)
    routed, masters = routed.quantized(problem), masters.quantized(one)
    group = dist.group.WORLD
    layers = {"routed": Layer(problem, group, backend=args.backend)}
    layers["inside"] = Layer(shared.problem, group, backend=args.backend)
    layers["beside"] = Layer(one, "alone", backend=args.backend)
    timer, dense, good = Timer(me, args.samples), by_torch(problem, whole), True
    for tokens in args.tokens:
        i = make_inputs(problem, tokens, device=me.device)
        only = torch.zeros(tokens, 1, dtype=torch.int64, device=me.device)
        ones = torch.ones(tokens, 1, device=me.device)

        def alone(x: Tensor, i=i) -> Tensor:
            return layers["routed"](x, i.topk_ids, i.topk_weights, routed)

        def beside(x: Tensor, only=only, ones=ones, alone=alone) -> Tensor:
            return alone(x) + layers["beside"](x, only, ones, masters)

        def inside(x: Tensor, i=i) -> Tensor:
            return layers["inside"](x, *shared.routes(i.topk_ids, i.topk_weights), every)

        ways = [
            Way("routed alone", alone),
            Way(f"beside, layer {args.precision}", beside),
            Way("beside, torch bf16", lambda x, alone=alone: alone(x) + dense(x)),
            Way("inside", inside),
        ]
        expected, scaled = ways[1].run(i.x), PRECISIONS[args.precision].w.scaled
        told = {}
        for way in ways[2:]:
            error = compare(way.run(i.x), expected).relative
            aligned = way.name == "inside" and shape.intermediate % SCALE_GROUP == 0
            limit = (SAME if aligned else OTHER)[scaled]
            told[way] = f"{error:.1e} from beside (limit {limit:g})"
            good &= error <= limit
        taken = timer.cool({w: Call(lambda _, w=w, x=i.x: w.run(x)) for w in ways})
        slowest = torch.tensor(list(taken.values()), device=me.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        me.print(f"{shape.name}, {shared.count} x {shape.intermediate} shared, T = {tokens}, us")
        for way, us in zip(ways, slowest.tolist(), strict=True):
            me.print(f"  {way.name:24}{us:10.0f}   {told.get(way, '')}")
    for layer in layers.values():
        layer.close()
    return good


def worker(me: Rank, args: argparse.Namespace) -> int:
    me.print(header())
    with torch.no_grad():
        good = [compare_ways(shape, me, args) for shape in shapes_from(args)]
    return 0 if all(good) else 1


def main() -> int:
    """Compare the ways; return 1 where they disagree."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--backend", default="auto", choices=("auto", "mega", "staged", "emulate"))
    add("--tokens", type=int, nargs="+", default=[8, 64, 512, 8192])
    add("--precision", default="bf16", choices=["bf16", "fp8"])
    add("--shared", type=int, help="intermediate of the shared expert; default: one expert's")
    add("--samples", type=int, default=20)
    add_launch_arguments(parser)
    add_shape_arguments(parser, default="dsv3")
    return launch(worker, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
