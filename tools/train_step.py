#!/usr/bin/env python3
"""Demo: train a small byte-level MoE language model with expert parallelism, and check it.

    python tools/train_step.py                       spawns its ranks: every GPU, or 2 on a CPU
    torchrun --nproc-per-node 4 tools/train_step.py  the same, started by torchrun
    python tools/train_step.py --curves curves.png   in BF16, FP8 and by staged: losses to a picture and a CSV

Attention and embeddings are data-parallel, the experts of every MegaMoE layer are spread over the ranks. Another
model, on one rank or with another backend, must agree, because expert parallelism changes where things are computed,
not what. It is compared twice: along the run it repeats single steps from the run's own parameters, which have to give
the same loss and gradients; at the end it trains its own first steps, which have to give the same losses.
"""

import argparse
import math
import sys
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist
from common import Rank, add_launch_arguments, launch
from demo_checks import FREE_STEPS, REPLAYS, Replay, checks_of_curves, checks_of_replay, report
from demo_curves import compare_curves, memory
from demo_model import ModelConfig, shared_corpus
from demo_training import WINDOW, Recipe, Setup, train

import megamoe
from megamoe.core.config import Problem
from megamoe.core.table import TRAINED
from megamoe.layer.functional import choose

CPU_MODEL = ModelConfig()
GPU_MODEL = ModelConfig(
    hidden=512, intermediate=512, num_experts=32, top_k=4, num_blocks=4, num_heads=8, context=256
)
OTHERS = {"staged": ("staged", "backend staged's"), "one-rank": ("1 rank", "the one-rank run's")}


def other_setup(how: str, this: Setup, me: Rank) -> Setup | None:
    """Return where the model to compare with runs; None on a rank that has no part in it. Collective."""
    if how == "staged":
        return replace(this, options=this.options | {"backend": "staged"})
    group = dist.new_group([0])
    return replace(this, group=group) if me.is_first else None


def problem_of(recipe: Recipe, me: Rank, precision: str) -> Problem:
    m = recipe.model
    sizes = (m.hidden, m.intermediate, m.num_experts, m.top_k, me.size, me.rank)
    return Problem(*sizes, max_tokens=recipe.batch // me.size * m.context, precision=precision)


def choose_backend(recipe: Recipe, me: Rank, precision: str) -> str:
    """Ask once, not in every layer, what "auto" is; if it is not the kernel, a line says why. Collective."""
    return choose("auto", problem_of(recipe, me, precision), dist.group.WORLD, me.device)


def worker(me: Rank, args: argparse.Namespace) -> int:
    on_gpu = me.device.type == "cuda"
    steps = args.steps or (400 if on_gpu else 300)
    batch = args.batch or (16 * me.size if on_gpu else 32)
    recipe = Recipe(GPU_MODEL if on_gpu else CPU_MODEL, batch=batch, steps=steps, seed=args.seed)
    if batch % me.size:
        raise SystemExit(f"--batch {batch} does not divide over {me.size} ranks")
    backend = args.backend
    if backend == "auto":
        backend = choose_backend(recipe, me, args.precision) if on_gpu else "staged"
    text = shared_corpus()
    m = recipe.model
    me.print(megamoe.memory_report(problem_of(recipe, me, args.precision))["line"])
    me.print(
        f"{len(text) / 1e6:.2f} MB of English; {m.num_blocks} blocks of attention and {m.num_experts} experts "
        f"(top {m.top_k}) on {me.size} ranks, {me.device.type}, backend {backend}, {args.precision}"
    )
    world = dist.group.WORLD
    this = Setup(recipe, text, me.device, world, {"backend": backend, "precision": args.precision})
    if args.curves is not None:
        good, _ = compare_curves(this, args.seeds or [args.seed], args.curves, me.print)
        return int(not good)
    how = args.compare
    if how == "auto":
        how = "one-rank" if me.size > 1 else "staged"
    other = None if how == "none" else other_setup(how, this, me)
    replay = None if how == "none" else Replay(other, recipe.steps, REPLAYS[me.device.type])
    curves = train(this, f"{me.size} ranks", inspect=replay and replay.inspect)
    both = curves.backward == backend
    me.print(f"{'PASS' if both else 'FAIL'}: backward by {curves.backward}; {memory(me.device)}")
    last = curves.losses[-WINDOW:]
    final = sum(last) / len(last)
    code = int(not both)
    good = final < args.target
    me.print(
        f"{'PASS' if good else 'FAIL'}: loss fell from {curves.losses[0]:.3f} (ln 256 = {math.log(256):.3f}) to "
        f"{final:.3f} nats per byte; target {args.target:g}"
    )
    code |= not good

    if replay is not None:
        replay.close()
        if other is not None:
            label, name = OTHERS[how]
            theirs = train(other, label, args.compare_steps or FREE_STEPS[me.device.type])
            if me.is_first:
                checks = checks_of_replay(replay, args)
                checks += checks_of_curves(curves, theirs, args)
                code |= not report(checks, name)
        dist.barrier()
    return int(code)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--backend", default="auto", choices=("auto", "staged", "mega", "emulate", "reference"))
    add("--precision", default="bf16", choices=TRAINED)
    add("--steps", type=int, help="training steps; default 400 on GPUs, 300 on a CPU")
    add("--batch", type=int, help="sequences per step over all ranks")
    add("--seed", type=int, default=1)
    add(
        "--target",
        type=float,
        default=2.5,
        help="the final loss has to be below this, nats per byte",
    )
    add("--curves", type=Path, metavar="PNG", help="compare whole runs in place of single steps")
    add("--seeds", type=int, nargs="+", help="of --curves, which then judges their mean")
    add("--compare", default="auto", choices=("auto", "one-rank", "staged", "none"))
    add("--compare-steps", type=int, help="steps that the other trains itself: 25 on a CPU, or 1")
    add("--loss-tolerance", type=float, default=5e-3, help="largest difference of losses, nats")
    add("--norm-tolerance", type=float, default=0.05, help="of gradient norms, relative")
    add(
        "--gradient-tolerance",
        type=float,
        default=0.05,
        help="of gradients from equal parameters: norm of the difference over the norm",
    )
    add_launch_arguments(parser)
    return launch(worker, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
