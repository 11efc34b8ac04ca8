"""tools/demo_curves.py --seeds: the demo trained by recipes of FP8, those of the kernel and simulated ones."""

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import mean
from typing import Any

from bench.demo.checks import Replay
from bench.demo.curves import Losses, summarize, write
from bench.demo.model import ByteLM
from bench.demo.recipes import E5M2, Fp8Recipe, SimulatedExperts
from bench.demo.step import setup_of
from bench.demo.training import final_loss, train
from bench.ranks import Rank
from bench.tables import PRINTED, header, write_table

# Options of MegaMoE.
LAYERS: dict[str, dict[str, Any]] = {
    "bf16": {"precision": "bf16"},
    "fp8": {"precision": "fp8", "weight_gradients": "bf16"},
    "fp8-e4m3": {"precision": "fp8", "weight_gradients": "e4m3"},
}
SIMULATED = {
    "fp8": Fp8Recipe(products="bf16"),
    "group": Fp8Recipe(),  # as fp8-e4m3
    "power": Fp8Recipe(rows="power"),
    "token": Fp8Recipe(rows="token"),
    "e5m2": Fp8Recipe(gradients=E5M2),
}
SHARED_STEPS = 4  # steps that are taken by all cases from equal parameters
GRADIENTS = "experts' gradients apart"  # the largest of these steps, relative
CASES = [*LAYERS, *(f"simulated-{name}" for name in SIMULATED)]
FP8_ON_CPU = ["bf16", *CASES[len(LAYERS) :]]  # without a kernel, FP8 layers take seconds per step


def options_of(case: str, backend: str) -> tuple[str, dict[str, Any]]:
    """Return who computes a case, and the options of the demo's layers."""
    kind, _, name = case.partition("simulated-")
    if not kind:
        return "simulated", {"experts": partial(SimulatedExperts, recipe=SIMULATED[name])}
    return backend, {"backend": backend, **LAYERS[case]}


def worker(me: Rank, args: argparse.Namespace) -> int:
    """Train every case with every seed; write the losses behind each run.

    Along the first case's run, the others also take single steps from its parameters and routes. How far their experts'
    gradients are from its own tells recipes apart that losses, which differ by chance, do not.
    """
    if me.size > 1:
        raise SystemExit(f"recipes are simulated on one rank, not {me.size}: --ranks 1")
    this, _ = setup_of(args, me)
    recipe, title = this.recipe, header()
    found: Losses = {}
    apart: dict[str, list[float]] = {}
    for seed in args.seeds:
        setups = {}
        for case in args.cases or (CASES if me.device.type == "cuda" else FP8_ON_CPU):
            name, options = options_of(case, this.options["backend"])
            key = name, case.removeprefix("simulated-")
            setups[key] = replace(this, options=options, recipe=replace(recipe, seed=seed))
        steps = {key: Replay(setup, recipe.steps, SHARED_STEPS) for key, setup in setups.items()}
        for key, setup in setups.items():
            label = " ".join(key)
            losses = train(setup, f"{label}, seed {seed}", inspect=every(steps)).losses
            for other in [*steps]:  # all of them, behind the first run
                replay = steps.pop(other)
                replay.close()
                apart.setdefault(" ".join(other), []).append(replay.apart["experts"])
            found[(*key, seed)] = losses
            me.print(f"{label}, seed {seed}: {final_loss(losses, args.window):.4f}")
            write(found, title, args.csv[0])  # each time: a later run may be cut off
            rows = [["recipes", of, GRADIENTS, f"{mean(all_):.4f}"] for of, all_ in apart.items()]
            table = args.csv[0].with_name(f"{args.csv[0].stem}-gradients.csv")
            write_table(table, title, rows, PRINTED)
    summarize(found, me.print, args.window)
    for label, of_seeds in apart.items():
        me.print(f"  {label}: {GRADIENTS} {mean(of_seeds):.2e} from the first case's")
    return 0


def every(steps: dict[tuple[str, str], Replay]) -> Callable[[ByteLM, int, float], None]:
    """Return what has all of these models take a step of a run."""

    def inspect(model: ByteLM, step: int, loss: float) -> None:
        for replay in steps.values():
            replay.inspect(model, step, loss)

    return inspect
