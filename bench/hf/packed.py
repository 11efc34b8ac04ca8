"""tools/train_packed.py: GPT-OSS-120B with frozen experts, packed or not: training steps, and generation."""

import argparse
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from bench.demo.model import ModelConfig, shared_corpus
from bench.demo.training import MasterAdamW, Recipe, Setup, final_loss
from bench.hf.cases import PACKED
from bench.hf.generate import Decoder
from bench.hf.model import OURS
from bench.hf.training import UNTIMED
from bench.hf.wide import milliseconds, release, stamp
from bench.ranks import Rank
from bench.tables import PRINTED, header, write_table

TINY = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_local_experts": 8, "vocab_size": 256},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 2},
}
EXPONENTS = 119, 121  # of MXFP4 scales: numbers of 0.016 on average, as initialized
GIB = 2**30
NAME, SHOWN = 80, 14  # letters of a kernel's name; kernels


@dataclass
class Result:
    """What a case leaves behind."""

    losses: list[float] = field(default_factory=list)  # nats per token
    ms: list[float] = field(default_factory=list)  # of the timed steps
    generated: dict[int, float] = field(default_factory=dict)  # batch -> tokens per second
    kernels: dict[str, dict[str, float]] = field(default_factory=dict)  # of a step, microseconds
    gib: dict[str, float] = field(default_factory=dict)  # weights; peaks of what followed


def config_of(args: argparse.Namespace, on_gpu: bool) -> Any:
    """Return the published GPT-OSS-120B's configuration, or a tiny one."""
    made: Any = transformers.GptOssConfig  # its fields are no arguments to a type checker
    sizes: dict[str, Any] = {} if on_gpu else TINY
    if args.layers:
        kinds = ["sliding_attention", "full_attention"] * args.layers
        sizes = sizes | {"num_hidden_layers": args.layers, "layer_types": kinds[: args.layers]}
    return made(**sizes, pad_token_id=None, bos_token_id=None, eos_token_id=None)


def model_of(case: str, args: argparse.Namespace, me: Rank) -> Any:
    """Return a model with random weights, drawn where they stay."""
    own = "grouped_mm" if me.device.type == "cuda" else "eager"
    with torch.device("meta"):
        model: Any = transformers.AutoModelForCausalLM.from_config(
            config_of(args, me.device.type == "cuda"),
            dtype=torch.bfloat16,
            experts_implementation=own if PACKED[case] is None else OURS,
            attn_implementation=args.attention,
        )
    packed = case.startswith("packed")
    if packed:
        import_module("megamoe.adapters.transformers_packed").pack_experts(model)
    model.to_empty(device=me.device)
    with me.device:
        rotary = model.model.rotary_emb
        model.model.rotary_emb = type(rotary)(config=model.config)
    draw(model)
    if PACKED[case] and not packed:
        import_module("megamoe.adapters.transformers").relayout(model)
    return model.requires_grad_(False)


@torch.no_grad()
def draw(model: nn.Module) -> None:
    """Fill all parameters with random numbers, in place."""
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith("_blocks"):
            parameter.random_(0, 256)
        elif name.endswith("_scales"):
            parameter.random_(*EXPONENTS)
        elif "norm" in name:
            parameter.fill_(1)
        else:
            parameter.normal_(0, 0.02)


def kernels_of(step: Callable[[], Any]) -> dict[str, float]:
    """Return the microseconds of each kernel that a step launches, the longest first."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    of = {e.key[:NAME]: e.self_device_time_total for e in found.key_averages()}
    longest = sorted(of, key=lambda name: -of[name])
    return {"all": sum(of.values())} | {name: of[name] for name in longest[:SHOWN]}


def trained(model: Any, rank: int | None) -> tuple[Any, list[nn.Parameter]]:
    """Return the model that is called, with adapters if peft is installed, and its parameters that are trained.

    rank: of adapters of the experts; None: experts have none.
    """
    targets = ["mlp.router.weight"]
    if rank is not None:
        import_module("megamoe.adapters.peft").install()
        targets += ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    whole = ["norm.weight", "lm_head.weight"]
    if find_spec("peft") is None:
        whole += ["router.weight", "router.bias"]
    else:
        peft: Any = import_module("peft")
        attention = [f"{name}_proj" for name in "qkvo"]
        model = peft.get_peft_model(
            model,
            peft.LoraConfig(r=rank or 8, target_modules=attention, target_parameters=targets),
        )
    for name, parameter in model.named_parameters():
        if name.endswith(tuple(whole)):
            parameter.requires_grad_(True)
    return model, [p for p in model.parameters() if p.requires_grad]


def train(model: Any, setup: Setup, args: argparse.Namespace, result: Result) -> str:
    """Take the steps of a recipe; return what was trained."""
    model, parameters = trained(model, args.experts)
    model.train()
    if args.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    on_gpu = setup.device.type == "cuda"
    optimizer = MasterAdamW(parameters, setup.recipe.weight_decay, fused=True)
    batches = [setup.batch(step) for step in range(setup.recipe.steps)]  # else each step waits
    losses: list[Tensor] = []
    stamps: list[Any] = []

    def take(step: int) -> None:
        inputs, targets = batches[step]
        given = {"labels": inputs, "shift_labels": targets.contiguous()}
        loss = model(input_ids=inputs, use_cache=False, **given).loss
        loss.backward()
        optimizer.step(setup.recipe.rate(step))
        losses.append(loss.detach())

    for step in range(len(batches)):
        if step >= UNTIMED:
            stamps.append(stamp(setup.device))
        take(step)
        if step == 0 and on_gpu:
            torch.cuda.synchronize()  # an error of a launch ends the case here
    stamps.append(stamp(setup.device))
    if on_gpu:
        torch.cuda.synchronize()
    result.losses = torch.stack(losses).tolist()
    if args.profile:
        result.kernels["training"] = kernels_of(lambda: take(len(batches) - 1))
    result.ms = [milliseconds(*pair) for pair in zip(stamps, stamps[1:], strict=False)]
    numbers = sum(p.numel() for p in parameters)
    return f"{numbers / 1e6:,.0f} M of {'LoRA, ' * (find_spec('peft') is not None)}norms, head"


def generate(model: Any, args: argparse.Namespace, result: Result) -> None:
    """Generate texts of each batch."""
    for batch in args.generate:
        decoder = Decoder(model, args.length, batch=batch)
        count = int(args.length) - 9  # one step is left for the profile
        _, steps_per_s = decoder.text(torch.arange(8), count)
        result.generated[batch] = batch * steps_per_s
        if args.profile:
            result.kernels[f"batch {batch}"] = kernels_of(decoder.graph.replay)


def run(case: str, args: argparse.Namespace, me: Rank, tokens: int) -> tuple[Result, str]:
    """Build a case's model, let it generate, train it. tokens: of a step."""
    on_gpu, options = me.device.type == "cuda", PACKED[case]
    adapter: Any = import_module("megamoe.adapters.transformers")
    experts = options and adapter.register(OURS, backend=args.backend, max_tokens=tokens, **options)
    result, what = Result(), "nothing"

    def peak(of: str) -> None:
        if on_gpu:
            result.gib[of] = torch.cuda.max_memory_allocated(me.device) / GIB
            torch.cuda.reset_peak_memory_stats(me.device)

    try:
        peak("before")
        model = model_of(case, args, me)
        peak("weights")
        start = time.perf_counter()
        generate(model, args, result)
        me.print(f"{case}: generated in {time.perf_counter() - start:.0f} s")
        peak("generation")
        if args.steps:
            context, start = tokens // args.sequences, time.perf_counter()
            recipe = Recipe(
                *(ModelConfig(context=context), args.sequences, UNTIMED + args.steps),
                learning_rate=3e-4,
                warmup=10,
            )
            setup = Setup(recipe, shared_corpus(), me.device, dist.group.WORLD, {})
            what = train(model, setup, args, result)
            me.print(f"{case}: trained in {time.perf_counter() - start:.0f} s")
            peak("training")
        layers = model.config.num_hidden_layers
        if experts and args.experts is None and experts.num_layers != layers:
            raise RuntimeError(f"megamoe computed {experts.num_layers} of {layers} layers")
        return result, what
    finally:
        if experts:
            experts.close()


def figures(result: Result, tokens: int) -> dict[str, str]:
    """Return what is printed and written of a case."""
    found = {f"GiB, {of}": f"{gib:.1f}" for of, gib in result.gib.items() if of != "before"}
    for batch, speed in result.generated.items():
        found[f"generated tokens/s, batch {batch}"] = f"{speed:.0f}"
    for of, kernels in result.kernels.items():
        found |= {f"us, {of}: {name}": f"{us:.0f}" for name, us in kernels.items()}
    if result.ms:
        ms = statistics.median(result.ms)
        found |= {"ms of a step": f"{ms:.1f}", "tokens/s": f"{1e3 * tokens / ms:.0f}"}
        found["first loss"] = f"{result.losses[0]:.4f}"
        found["last loss"] = f"{final_loss(result.losses):.4f}"
    return found


def worker(me: Rank, args: argparse.Namespace) -> int:
    if me.size > 1:
        raise SystemExit(f"one rank, not {me.size}: --ranks 1")
    transformers.utils.logging.disable_progress_bar()
    title, rows, steps, failed = header(), [], [], 0
    tokens = int(args.tokens or (4096 if me.device.type == "cuda" else 64))
    for case in args.cases:
        try:
            result, what = run(case, args, me, tokens)
        except Exception:  # the other cases still count
            traceback.print_exc()
            me.print(f"FAIL: {case}")
            failed += 1
        else:
            found = figures(result, tokens)
            me.print(
                f"{case}, trained {what}", *(f"  {k}: {v}" for k, v in found.items()), sep="\n"
            )
            rows += [["packed", case, *pair] for pair in found.items()]
            timed = [""] * (len(result.losses) - len(result.ms)) + result.ms
            pairs = zip(result.losses, timed, strict=True)
            steps += [[case, step, *pair] for step, pair in enumerate(pairs, start=1)]
        release(me)
        if args.curves is not None and rows:
            write_table(args.curves, title, rows, PRINTED)
            behind = args.curves.with_name(f"{args.curves.stem}-steps.csv")
            write_table(behind, title, steps, ["case", "step", "loss", "ms"])
    return failed
