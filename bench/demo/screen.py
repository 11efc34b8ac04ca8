"""tools/demo_curves.py --seeds: the demo trained by recipes of FP8, those of the kernel and simulated ones."""

import argparse
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist

from bench.demo.curves import Losses, final_loss, summarize, write
from bench.demo.model import shared_corpus
from bench.demo.recipes import E5M2, Fp8Recipe, SimulatedExperts
from bench.demo.step import CPU_MODEL, GPU_MODEL
from bench.demo.training import Recipe, Setup, train
from bench.ranks import Rank
from bench.shapes import problem_of
from bench.tables import header
from megamoe.backends.select import choose
from megamoe.testing.shapes import Shape

# Options of MegaMoE.
LAYERS: dict[str, dict[str, Any]] = {
    "bf16": {"precision": "bf16"},
    "fp8": {"precision": "fp8"},
    "fp8-e4m3": {"precision": "fp8", "weight_gradients": "e4m3"},
}
SIMULATED = {
    "fp8": Fp8Recipe(products="bf16"),
    "group": Fp8Recipe(),  # as fp8-e4m3
    "power": Fp8Recipe(rows="power"),
    "token": Fp8Recipe(rows="token"),
    "e5m2": Fp8Recipe(gradients=E5M2),
}
CASES = [*LAYERS, *(f"simulated-{name}" for name in SIMULATED)]
FP8_ON_CPU = ["bf16", *CASES[len(LAYERS) :]]  # without a kernel, FP8 layers take seconds per step


def options_of(case: str, backend: str) -> tuple[str, dict[str, Any]]:
    """Return who computes a case, and the options of the demo's layers."""
    kind, _, name = case.partition("simulated-")
    if not kind:
        return "simulated", {"experts": partial(SimulatedExperts, recipe=SIMULATED[name])}
    return backend, {"backend": backend, **LAYERS[case]}


def worker(me: Rank, args: argparse.Namespace) -> int:
    """Train every case with every seed; write the losses behind each run."""
    on_gpu = me.device.type == "cuda"
    if me.size > 1:
        raise SystemExit(f"recipes are simulated on one rank, not {me.size}: --ranks 1")
    model = GPU_MODEL if on_gpu else CPU_MODEL
    batch = args.batch or (16 if on_gpu else 32)
    recipe = Recipe(model, batch=batch, steps=args.steps or (400 if on_gpu else 300))
    shape = Shape("demo", model.hidden, model.intermediate, model.num_experts, model.top_k)
    problem = problem_of(shape, batch * model.context, me)
    backend = choose("auto", problem, dist.group.WORLD, me.device) if on_gpu else "staged"
    this, title = Setup(recipe, shared_corpus(), me.device, dist.group.WORLD, {}), header()
    found: Losses = {}
    for seed in args.seeds:
        for case in args.cases or (CASES if on_gpu else FP8_ON_CPU):
            name, options = options_of(case, backend)
            setup = replace(this, options=options, recipe=replace(recipe, seed=seed))
            losses = train(setup, f"{name} {case}, seed {seed}").losses
            case = case.removeprefix("simulated-")
            found[name, case, seed] = losses
            me.print(f"{name} {case}, seed {seed}: {final_loss(losses, args.window):.4f}")
            write(found, title, args.csv[0])  # each time: a later run may be cut off
    summarize(found, me.print, args.window)
    return 0
