"""tools/train_hf.py: the same model trained with megamoe's experts and with transformers' own, step against step."""

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor

import megamoe
from bench.demo.checks import report
from bench.demo.curves import Key, Losses, draw, paired, read, summarize, write
from bench.demo.model import ModelConfig, shared_corpus
from bench.demo.training import WINDOW, Recipe, Setup, final_loss
from bench.hf.cases import CASES
from bench.hf.generate import Decoder
from bench.hf.model import CPU_SIZES, GPU_SIZES, OURS, Sizes, saved_model
from bench.hf.training import Run, compare, train
from bench.plot import wrote
from bench.ranks import Rank
from bench.shapes import problem_of
from bench.tables import header
from megamoe.testing.shapes import Shape

PROMPT = b"A class is "


def setup_of(args: argparse.Namespace, me: Rank) -> tuple[Setup, Sizes]:
    """Return the recipe on these ranks, and the sizes of the model. Collective."""
    on_gpu = me.device.type == "cuda"
    sizes = GPU_SIZES if on_gpu else CPU_SIZES
    steps = args.steps or (300 if on_gpu else 60)
    recipe = Recipe(
        ModelConfig(context=sizes.context),
        batch=sizes.batch * me.size,
        steps=steps,
        learning_rate=1e-3 if on_gpu else 3e-3,
        seed=args.seeds[0],
    )
    return Setup(recipe, shared_corpus(), me.device, dist.group.WORLD, {}), sizes


def choose_backend(name: str, sizes: Sizes, me: Rank) -> str:
    """Ask once, not in every layer, what "auto" is; a line says why it is not the kernel. Collective."""
    shape = Shape("demo", sizes.hidden, sizes.intermediate, sizes.experts, sizes.top_k)
    problem = problem_of(shape, sizes.batch * sizes.context, me)
    chosen = me.choose(name, problem)
    me.print(
        f"{sizes.layers} layers of {sizes.experts} experts (top {sizes.top_k}) on {me.size} ranks, "
        f"{sizes.batch * sizes.context} tokens each, {me.device.type}, backend {chosen}"
    )
    if chosen == "mega":
        me.print(megamoe.memory_report(problem)["line"])
    return chosen


def own_experts(name: str | None, me: Rank) -> str:
    """Return transformers' implementation that we compare with."""
    return name or ("grouped_mm" if me.device.type == "cuda" else "eager")


def worker(me: Rank, args: argparse.Namespace) -> int:
    adapter: Any = import_module("megamoe.adapters.transformers")
    if me.size > 1 and adapter.EPImplementationInterface is None:
        version = transformers.__version__
        raise SystemExit(f"several ranks need transformers 5.23, this is {version}: --ranks 1")
    transformers.utils.logging.disable_progress_bar()
    setup, sizes = setup_of(args, me)
    other = own_experts(args.compare, me)
    backend = choose_backend(args.backend, sizes, me)
    tokens = sizes.batch * sizes.context
    register = partial(adapter.register, backend=backend, max_tokens=tokens)
    if args.cases:
        return train_cases(args, setup, sizes, me, register)
    experts = register()
    found: dict[Key, Run] = {}
    good, title = True, header()
    for seed in args.seeds:
        setup, runs = replace(setup, recipe=replace(setup.recipe, seed=seed)), {}
        with saved_model(sizes, seed, me) as folder:
            for name in (OURS, other):
                runs[name] = run = train(folder, name, setup, me, lambda: experts.num_layers)
                me.print(
                    f"{name}: {run.tokens_per_s(setup):,.0f} tokens/s, {run.peak}, loss "
                    f"{run.losses[0]:.3f} -> {final_loss(run.losses):.3f} nats per byte, seed {seed}"
                )
                found[name, "bf16", seed] = Run(run.losses, run.seconds)
                if me.is_first and args.curves is not None:  # each time: a later run may be cut off
                    write_curves(args.curves, found, setup, title)
                experts.close()
            called = [run.called for run in runs.values()] == [sizes.layers, 0]
            me.print(
                f"{'PASS' if called else 'FAIL'}: {runs[OURS].called} of {sizes.layers} layers by "
                f"megamoe, {runs[other].called} in the other run"
            )
            tolerances = args.loss_tolerance, args.gradient_tolerance
            checks = compare(folder, other, setup, runs[OURS], me, tolerances)
            experts.close()
        good &= called
        if me.is_first:
            good &= report(checks, f"those with {other}")
    me.print(f"final losses, mean of the last {WINDOW} steps: {difference(found, other)}")
    if me.is_first and args.curves is not None:
        draw_curves(args.curves)
    if me.is_first and args.generate:
        show_text(args.generate, sizes, runs[OURS].weights, me)
        experts.close()
    dist.barrier()
    return int(not good)


def train_cases(
    args: argparse.Namespace, setup: Setup, sizes: Sizes, me: Rank, register: Callable[..., Any]
) -> int:
    """Train each case with each seed and judge nothing; compare losses with the first case's. Collective."""
    found: Losses = {}
    title = header()
    for seed in args.seeds:
        this = replace(setup, recipe=replace(setup.recipe, seed=seed))
        with saved_model(sizes, seed, me) as folder:
            for case in args.cases:
                options = CASES[case]
                experts = None if options is None else register(**options)
                name = OURS if experts else own_experts(args.compare, me)
                found["hf", case, seed] = losses = train(folder, name, this, me).losses
                me.print(f"{case}, seed {seed}: {final_loss(losses, args.window):.4f}")
                if experts is not None:
                    experts.close()
                if me.is_first and args.curves is not None:  # each time: a later run may be cut off
                    write(found, title, args.curves.with_suffix(".csv"))
    summarize(found, me.print, args.window)
    return 0


def difference(found: dict[Key, Run], other: str) -> str:
    """Return how far our final losses are from those of the other experts, seed by seed."""
    ours, theirs = (
        [final_loss(run.losses) for key, run in found.items() if key[0] == name]
        for name in (OURS, other)
    )
    apart, error = paired(ours, theirs)
    stated = f", standard error {error:.2%}" if len(ours) > 1 else ""
    return f"{OURS} {apart:+.2%} from {other}{stated}, {len(ours)} seeds"


def write_curves(path: Path, by_key: dict[Key, Run], setup: Setup, title: str) -> None:
    """Write the CSV of a picture: losses, each step's seconds and the tokens of all ranks in it."""
    losses = {key: run.losses for key, run in by_key.items()}
    tokens = setup.recipe.batch * setup.recipe.model.context
    more: dict[str, dict[Key, Any]] = {
        "seconds": {key: run.seconds for key, run in by_key.items()},
        "tokens": {key: [tokens] * len(run.seconds) for key, run in by_key.items()},
    }
    write(losses, title, path.with_suffix(".csv"), more)


def draw_curves(path: Path) -> None:
    """Draw the losses of its CSV."""
    table = path.with_suffix(".csv")
    title, losses = read(table)
    print(wrote(draw(losses, title, path), path, table), flush=True)


def show_text(num_bytes: int, sizes: Sizes, weights: dict[str, Tensor], me: Rank) -> None:
    """Print text of the trained model, all of it on this rank."""
    model = transformers.AutoModelForCausalLM.from_config(
        sizes.config(), dtype=torch.bfloat16, experts_implementation=OURS
    )
    model.load_state_dict(weights)
    prompt = torch.tensor(list(PROMPT))
    torch.manual_seed(0)
    decoder = Decoder(model.to(me.device), len(prompt) + num_bytes)
    text, speed = decoder.text(prompt, num_bytes)
    how = "replays of a captured step" if decoder.graph else "eager steps"
    print(f"{num_bytes} bytes by {how}, {speed:,.0f} bytes/s:", flush=True)
    print((PROMPT + bytes(text.tolist())).decode(errors="replace"), flush=True)
