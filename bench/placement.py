"""tools/placement.py: a layer with a placement next to one without, timed in turns under even and skewed routing."""

import argparse
from functools import partial

import torch
from torch import Tensor

import megamoe
from bench.ranks import Rank
from bench.shapes import problem_of, shapes_from
from bench.timing import Contender, Timer
from megamoe.testing import Inputs, make_inputs, make_weights


def worker(me: Rank, args: argparse.Namespace) -> int:
    """Print us of each layer, and the tokens of the fullest rank over those of the mean."""
    me.print("shape,precision,ranks,tokens,routing,layer,us,fullest rank over mean")
    for shape in shapes_from(args):
        problem = problem_of(shape, args.tokens, me, args.precision)
        num_slots = problem.num_experts + args.slots * me.size
        call_of = {
            routing: make_inputs(
                problem, args.tokens, rank=me.rank, routing=routing, device=me.device
            )
            for routing in ("uniform", "skewed")
        }
        for routing, i in call_of.items():
            mine = torch.bincount(i.topk_ids.flatten(), minlength=problem.num_experts).cpu()
            load = torch.stack(me.gather(mine)).sum(0)
            even = megamoe.ExpertPlacement.balanced(load, num_slots, me.size)
            group = me.group or "alone"
            plain = megamoe.Layer(problem, group, backend=args.backend)
            placed = megamoe.PlacedLayer(problem, group, backend=args.backend, placement=even)
            made = {"without": plain, "with": placed}
            weights = {n: make_weights(m.problem, device=me.device) for n, m in made.items()}
            with torch.no_grad():
                calls = [partial(_call, made[n], i, w) for n, w in weights.items()]
                contenders = [Contender(n, call) for n, call in zip(made, calls, strict=True)]
                for call in calls:
                    call(None)
                medians = Timer(me.device, args.samples).medians(contenders)
            for (name, layer), us in zip(made.items(), medians, strict=True):
                rows = me.gather(int(layer.statistics().tokens_per_expert.sum()))
                start = f"{shape.name},{args.precision},{me.size},{args.tokens},{routing},{name}"
                me.print(f"{start},{us:.1f},{max(rows) * me.size / sum(rows):.2f}")
                layer.close()
    return 0


def _call(layer: megamoe.Layer, i: Inputs, weights: megamoe.ExpertWeights, _: object) -> Tensor:
    y: Tensor = layer(i.x, i.topk_ids, i.topk_weights, weights)
    return y
