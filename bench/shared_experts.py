"""tools/shared_experts.py: a layer with a shared expert beside it and inside it, timed in turns and compared."""

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.ranks import Rank
from bench.shapes import problem_of
from bench.sweep import compare_all
from bench.timing import Contender, Timer
from megamoe import ExpertWeights, Layer, Problem, SharedExperts
from megamoe.core.table import PRECISIONS, SCALE_GROUP
from megamoe.testing import Inputs, compare, make_inputs, make_weights
from megamoe.testing.shapes import Shape

# Of y, relative: of bf16 sums, of other bits of h; where FP8's blocks are others, or one side is bf16
SAME, OTHER = {False: 1e-2, True: 2e-2}, {False: 1e-2, True: 0.1}


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
    problem = problem_of(shape, max(args.tokens), me, args.precision)
    shared = SharedExperts(problem, args.shared or shape.intermediate, device=me.device)
    width = shared.count * shape.intermediate
    one = replace(problem, intermediate=width, num_experts=1, top_k=1, ep_size=1, rank=0)
    masters = make_weights(one, seed=1, device=me.device, quantize=False)
    whole = ExpertWeights(**{n: t[0] for n, t in masters.named().items()})
    routed = make_weights(problem, device=me.device, quantize=False)
    every = shared.join(routed, shared.parts(whole)).quantized(shared.problem)
    routed, masters = routed.quantized(problem), masters.quantized(one)
    layers = {"routed": Layer(problem, dist.group.WORLD, backend=args.backend)}
    layers["inside"] = Layer(shared.problem, dist.group.WORLD, backend=args.backend)
    layers["beside"] = Layer(one, "alone", backend=args.backend)
    timer, dense, good = Timer(me.device, args.samples), by_torch(problem, whole), True

    def ways_of(i: Inputs) -> list[Contender]:
        only = torch.zeros(i.x.shape[0], 1, dtype=torch.int64, device=me.device)
        ones = torch.ones(i.x.shape[0], 1, device=me.device)

        def alone(_: Any) -> Tensor:
            return layers["routed"](i.x, i.topk_ids, i.topk_weights, routed)

        def beside(_: Any) -> Tensor:
            return alone(_) + layers["beside"](i.x, only, ones, masters)

        def inside(_: Any) -> Tensor:
            return layers["inside"](i.x, *shared.routes(i.topk_ids, i.topk_weights), every)

        return [
            Contender("routed alone", alone),
            Contender(f"beside, layer {args.precision}", beside),
            Contender("beside, torch bf16", lambda _: alone(_) + dense(i.x)),
            Contender("inside", inside),
        ]

    for tokens in args.tokens:
        ways = ways_of(make_inputs(problem, tokens, device=me.device))
        expected, scaled = ways[1].timed(None), PRECISIONS[args.precision].w.scaled
        told = {}
        for way in ways[2:]:
            error = compare(way.timed(None), expected).relative
            aligned = way.name == "inside" and shape.intermediate % SCALE_GROUP == 0
            limit = (SAME if aligned else OTHER)[scaled]
            told[way] = f"{error:.1e} from beside (limit {limit:g})"
            good &= error <= limit
        me.print(f"{shape.name}, {shared.count} x {shape.intermediate} shared, T = {tokens}, us")
        for way, us in zip(ways, timer.medians(ways), strict=True):
            me.print(f"  {way.name:24}{us:10.0f}   {told.get(way, '')}")
    for layer in layers.values():
        layer.close()
    return good


def worker(me: Rank, args: argparse.Namespace) -> int:
    return compare_all(me, args, compare_ways)
