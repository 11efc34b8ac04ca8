"""tools/train_step.py: one training run over the ranks, held against another model."""

import argparse
import math
from dataclasses import replace

import torch.distributed as dist

import megamoe
from bench.demo.checks import (
    FREE_STEPS,
    REPLAYED_ON,
    Replay,
    checks_of_curves,
    checks_of_replay,
    report,
)
from bench.demo.curves import compare_curves, memory
from bench.demo.model import ModelConfig, shared_corpus
from bench.demo.training import Recipe, Setup, final_loss, train
from bench.ranks import Rank
from bench.shapes import problem_of
from megamoe.testing.shapes import Shape

CPU_MODEL = ModelConfig()
GPU_MODEL = ModelConfig(
    hidden=512, intermediate=512, num_experts=32, top_k=4, num_blocks=4, num_heads=8, context=256
)
OTHERS = {"staged": ("staged", "backend staged's"), "one-rank": ("1 rank", "the one-rank run's")}


def setup_of(
    args: argparse.Namespace,
    me: Rank,
    backend: str = "auto",
    precision: str = "bf16",
    seed: int = 1,
) -> tuple[Setup, megamoe.Problem]:
    """Return the demo's recipe on these ranks with the options of its layers, and the problem of a layer. Collective.

    args: with batch and steps, None for the defaults.
    """
    on_gpu = me.device.type == "cuda"
    m = GPU_MODEL if on_gpu else CPU_MODEL
    batch = args.batch or (16 * me.size if on_gpu else 32)
    if batch % me.size:
        raise SystemExit(f"--batch {batch} does not divide over {me.size} ranks")
    recipe = Recipe(m, batch=batch, steps=args.steps or (400 if on_gpu else 300), seed=seed)
    shape = Shape("demo", m.hidden, m.intermediate, m.num_experts, m.top_k)
    problem = problem_of(shape, batch // me.size * m.context, me, precision)
    # Asked once, not in every layer; where it is not the kernel, a line says why.
    if backend == "auto":
        backend = me.choose("auto", problem) if on_gpu else "staged"
    options = {"backend": backend, "precision": precision}
    return Setup(recipe, shared_corpus(), me.device, dist.group.WORLD, options), problem


def other_setup(how: str, this: Setup, me: Rank) -> Setup | None:
    """Return where the model to compare with runs; None on a rank that has no part in it. Collective."""
    if how == "staged":
        return replace(this, options=this.options | {"backend": "staged"})
    group = dist.new_group([0])
    return replace(this, group=group) if me.is_first else None


def worker(me: Rank, args: argparse.Namespace) -> int:
    this, problem = setup_of(args, me, args.backend, args.precision, args.seed)
    recipe, m = this.recipe, this.recipe.model
    me.print(megamoe.memory_report(problem)["line"])
    me.print(
        f"{len(this.text) / 1e6:.2f} MB of English; {m.num_blocks} blocks of attention and {m.num_experts} experts "
        f"(top {m.top_k}) on {me.size} ranks, {me.device.type}, backend {this.options['backend']}, "
        f"{args.precision}"
    )
    if args.curves is not None:
        good, _ = compare_curves(this, args.seeds or [args.seed], args.curves, me.print)
        return int(not good)
    how = args.compare
    if how == "auto":
        how = "one-rank" if me.size > 1 else "staged"
    other = None if how == "none" else other_setup(how, this, me)
    replay = None if how == "none" else Replay(other, recipe.steps, REPLAYED_ON[me.device.type])
    curves = train(this, f"{me.size} ranks", inspect=replay.inspect if replay else None)
    me.print(memory(me.device))
    final = final_loss(curves.losses)
    good = final < args.target
    me.print(
        f"{'PASS' if good else 'FAIL'}: loss fell from {curves.losses[0]:.3f} (ln 256 = {math.log(256):.3f}) to "
        f"{final:.3f} nats per byte; target {args.target:g}"
    )
    code = int(not good)
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
