"""tools/train_hf.py --wide: a model of real width, trained in several cases on one GPU, and where its steps go."""

import argparse
import gc
import math
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

import megamoe
from bench.demo.model import ModelConfig, shared_corpus
from bench.demo.training import MasterAdamW, Recipe, Setup, final_loss
from bench.hf.cases import CASES, LABELS
from bench.hf.model import CPU_SIZES, OURS, WIDE_SIZES, Sizes, parts
from bench.hf.run import choose_backend
from bench.hf.training import UNTIMED, backward, cross_entropy
from bench.ranks import Rank
from bench.tables import PRINTED, header, write_table
from megamoe.core.table import PRECISIONS

TRACED = 2  # steps behind the timed ones that are cut into parts
PARTS = ("attention", "norms", "router", "experts forward", "experts backward", "head")
REST, OPTIMIZER, QUANTIZING = "rest", "optimizer", "quantizing"
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Timeline:
    """Cut steps into parts. From each mark on, time belongs to the mark's part; on a GPU, in the stream's order."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.active = device, False
        self.marks: list[tuple[str, Any]] = []

    def mark(self, part: str) -> None:
        if self.active:
            self.marks.append((part, stamp(self.device)))

    def ms(self) -> dict[str, float]:
        """Return the milliseconds of each part. The device must have finished; the last mark is an end."""
        found = dict.fromkeys((*PARTS, REST, OPTIMIZER, QUANTIZING), 0.0)
        for (part, start), (_, end) in zip(self.marks, self.marks[1:], strict=False):
            found[part] += milliseconds(start, end)
        return found

    def watch(self, module: Any, part: str, back: str = "", after: str = REST) -> None:
        """Mark where a module's forward pass and its backward pass begin and end.

        back: the backward pass's part, by default the same. after: what follows the forward pass, and, where that is
        another part than this one, precedes the backward pass.
        """
        inner, back = module.forward, back or part

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not self.active:
                return inner(*args, **kwargs)
            args, kwargs = self._marked((args, kwargs), part, REST)
            return self._marked(inner(*args, **kwargs), after, back)

        module.forward = forward

    def _marked(self, tree: Any, ahead: str, back: str) -> Any:
        """Return a tree of tensors whose use marks `ahead` now, and `back` when gradients come by."""
        leaves, spec = tree_flatten(tree)
        at = [i for i, t in enumerate(leaves) if isinstance(t, Tensor) and t.requires_grad]
        for i, t in zip(at, _Mark.apply(self, ahead, back, *(leaves[i] for i in at)), strict=True):
            leaves[i] = t
        return tree_unflatten(leaves, spec)


class _Mark(torch.autograd.Function):
    """The identity, which marks a timeline in both directions."""

    @staticmethod
    def forward(ctx: Any, timeline: Timeline, ahead: str, back: str, *tensors: Tensor) -> Any:
        ctx.timeline, ctx.back = timeline, back
        ctx.set_materialize_grads(False)
        timeline.mark(ahead)
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        ctx.timeline.mark(ctx.back)
        return None, None, None, *gradients


def stamp(device: torch.device) -> Any:
    """Return a point in time, on a GPU in the stream's order. It does not wait."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(start: Any, end: Any) -> float:
    """Return the time between two results of stamp(). The device must have finished."""
    if isinstance(start, float):
        return 1e3 * (end - start)
    return float(start.elapsed_time(end))


@dataclass
class Result:
    """What a case leaves behind."""

    losses: list[float] = field(default_factory=list)  # of all steps, nats per token
    ms: list[float] = field(default_factory=list)  # of the timed steps
    parts: dict[str, float] = field(default_factory=dict)  # milliseconds of a step
    peak_gib: float = float("nan")

    def tokens_per_s(self, tokens: int) -> float:
        return 1e3 * tokens / statistics.median(self.ms)


@dataclass(frozen=True)
class Wide:
    """What all cases have in common. register: makes megamoe's experts of a case's options."""

    sizes: Sizes
    setup: Setup
    masters: str
    compiled: bool
    register: Callable[..., Any]

    @property
    def tokens(self) -> int:
        return self.sizes.batch * self.sizes.context

    def model(self, experts: str, masters: torch.dtype) -> Any:
        """Return a model with random weights, made where they stay. masters: dtype of its experts."""
        torch.manual_seed(self.setup.recipe.seed)
        with self.setup.device:
            model: Any = transformers.AutoModelForCausalLM.from_config(
                self.sizes.config(), dtype=torch.bfloat16, experts_implementation=experts
            )
        for parameter in parts(model)["experts"]:
            parameter.data = parameter.data.to(masters)
        return model.train()

    def run(self, name: str) -> Result:
        """Train a case. Its model is gone then."""
        options, on_gpu = CASES[name], self.setup.device.type == "cuda"
        quantizes = options is not None and PRECISIONS[options["precision"]].w.scaled
        experts = None if options is None else self.register(**options)
        own = "grouped_mm" if on_gpu else "eager"
        try:
            model = self.model(
                OURS if experts else own, DTYPES[self.masters] if quantizes else torch.bfloat16
            )
            result = self._train(model, quantizes)
            called = experts.num_layers if experts else 0
            if called != (self.sizes.layers if experts else 0):
                raise RuntimeError(f"megamoe computed {called} of {self.sizes.layers} layers")
            if not all(map(math.isfinite, result.losses)):
                raise RuntimeError(f"losses are {result.losses}, expected finite numbers")
            return result
        finally:
            if experts is not None:
                experts.close()

    def _train(self, model: Any, quantizes: bool) -> Result:
        recipe, device = self.setup.recipe, self.setup.device
        on_gpu, timeline = device.type == "cuda", Timeline(device)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        loss_of = compile_dense(model) if self.compiled else cross_entropy
        watch_parts(model, timeline)
        optimizer = MasterAdamW(
            list(model.parameters()), recipe.weight_decay, DTYPES[self.masters], fused=True
        )
        batches = [self.setup.batch(step) for step in range(recipe.steps)]  # else each step waits
        losses, stamps = [], []
        for step, batch in enumerate(batches):
            timeline.active = step >= recipe.steps - TRACED
            stamps.append(stamp(device))
            timeline.mark(REST)
            losses.append(backward(model, *batch, loss_of))
            timeline.mark(OPTIMIZER)
            optimizer.step(recipe.rate(step))
            timeline.mark(QUANTIZING)
            if quantizes:
                megamoe.quantize_experts(model)  # what the optimizer wrote
            timeline.mark(REST)
            if step == 0 and on_gpu:
                torch.cuda.synchronize()  # an error of a launch ends the case here
        if on_gpu:
            torch.cuda.synchronize()
        timed = stamps[UNTIMED : recipe.steps - TRACED + 1]
        return Result(
            torch.stack(losses).tolist(),
            [milliseconds(*pair) for pair in zip(timed, timed[1:], strict=False)],
            {part: ms / TRACED for part, ms in timeline.ms().items()},
            torch.cuda.max_memory_allocated(device) / 2**30 if on_gpu else float("nan"),
        )


def watch_parts(model: Any, timeline: Timeline) -> None:
    """Have a timeline see the parts of a Qwen3-MoE."""
    timeline.watch(model.lm_head, "head", after="head")
    timeline.watch(model.model.norm, "norms")
    for layer in model.model.layers:
        timeline.watch(layer.self_attn, "attention")
        timeline.watch(layer.input_layernorm, "norms")
        timeline.watch(layer.post_attention_layernorm, "norms")
        timeline.watch(layer.mlp.gate, "router")
        timeline.watch(layer.mlp.experts, "experts forward", "experts backward")


def compile_dense(model: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """Compile attention, norms and routers of a model in place; return a compiled loss."""
    torch._dynamo.config.recompile_limit = 64  # one code for all layers
    modules = [model.model.norm]
    for layer in model.model.layers:
        modules += [layer.self_attn, layer.input_layernorm, layer.post_attention_layernorm]
        modules.append(layer.mlp.gate)
    for module in modules:
        module.forward = torch.compile(module.forward, dynamic=False)
    return torch.compile(cross_entropy, dynamic=False)


def wide_of(args: argparse.Namespace, me: Rank) -> Wide:
    """Return the common part of all cases. Collective."""
    on_gpu = me.device.type == "cuda"
    sizes = WIDE_SIZES if on_gpu else CPU_SIZES
    layers = args.layers or (8 if on_gpu and args.masters == "fp32" else sizes.layers)
    sizes = replace(sizes, layers=layers)
    steps = UNTIMED + (args.steps or (46 if on_gpu else 4)) + TRACED
    recipe = Recipe(
        *(ModelConfig(context=sizes.context), sizes.batch, steps),
        **{"learning_rate": 3e-4, "warmup": 10, "seed": args.seeds[0]},
    )
    adapter: Any = import_module("megamoe.adapters.transformers")
    backend, tokens = choose_backend(args.backend, sizes, me), sizes.batch * sizes.context

    def register(**options: Any) -> Any:
        return adapter.register(OURS, backend=backend, max_tokens=tokens, **options)

    setup = Setup(recipe, shared_corpus(), me.device, dist.group.WORLD, {})
    return Wide(sizes, setup, args.masters, args.compile, register)


def worker(me: Rank, args: argparse.Namespace) -> int:
    if me.size > 1:
        raise SystemExit(f"--wide trains on one rank, not {me.size}: --ranks 1")
    transformers.utils.logging.disable_progress_bar()
    wide, found, title = wide_of(args, me), dict[str, Result](), header()
    cases = args.cases or list(CASES)
    for name in cases:
        start = time.perf_counter()
        try:
            found[name] = wide.run(name)
        except Exception:  # the other cases still count
            traceback.print_exc()
            me.print(f"FAIL: {name}")
        else:
            me.print(f"{line(name, found[name], wide)}; {time.perf_counter() - start:.0f} s")
        release(me)
        if args.curves is not None and found:  # each time: a later case may be cut off
            write_results(args.curves, found, wide, title)
    return int(len(found) < len(cases))


def release(me: Rank) -> None:
    """Free the memory of a case; say what is left, which the next peak contains."""
    torch._dynamo.reset()
    gc.collect()
    if me.device.type == "cuda":
        torch.cuda.empty_cache()
        left = torch.cuda.memory_allocated(me.device) / 2**30
        if left > 0.1:
            me.print(f"{left:.2f} GiB are still allocated")


def line(name: str, result: Result, wide: Wide) -> str:
    """Return what is printed of a case."""
    of = ", ".join(f"{part} {ms:.1f}" for part, ms in result.parts.items() if ms)
    return (
        f"{name}: {result.tokens_per_s(wide.tokens):,.0f} tokens/s, peak {result.peak_gib:.1f} GiB, loss "
        f"{result.losses[0]:.4f} -> {final_loss(result.losses):.4f}; ms of a step: {of}"
    )


def write_results(path: Path, found: dict[str, Result], wide: Wide, title: str) -> None:
    """Write PATH.csv, figures of each case as printed.csv has them, and PATH-steps.csv, a row for each step."""
    figures, steps = [], []
    for name, result in found.items():
        case = LABELS[name]
        case += f", fp32 masters, {wide.sizes.layers} layers" * (wide.masters == "fp32")
        case += ", compiled" * wide.compiled
        speed = f"{result.tokens_per_s(wide.tokens):.0f}"
        memory, loss = f"{result.peak_gib:.1f}", f"{final_loss(result.losses):.4f}"
        of = {"tokens/s": speed, "peak GiB": memory, "loss": loss}
        figures += [["wide", case, *pair] for pair in of.items()]
        figures += [["parts", case, part, f"{ms:.1f}"] for part, ms in result.parts.items()]
        timed = [""] * UNTIMED + result.ms + [""] * TRACED
        steps += [
            [case, step, *pair]
            for step, pair in enumerate(zip(result.losses, timed, strict=True), start=1)
        ]
    write_table(path.with_suffix(".csv"), title, figures, PRINTED)
    behind = path.with_name(f"{path.stem}-steps.csv")
    write_table(behind, title, steps, ["case", "step", "loss", "ms"])
