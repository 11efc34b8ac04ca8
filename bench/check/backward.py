"""Backward of a case on one rank: every gradient, and the stages of the pass, against the oracle."""

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import megamoe
from bench.check.cases import Case
from bench.check.oracle import Drawn, Oracle
from bench.check.projections import Gradients, check_everywhere
from bench.ranks import Rank
from megamoe.backends.call import Call, GradRequest, Needs
from megamoe.backends.reference.route import Rows
from megamoe.backends.select import make_backend
from megamoe.launch.arguments import Plan
from megamoe.testing import same_bits
from megamoe.testing.gradients import BACKWARD_STAGES, GRADIENTS, OF_EXPERTS, GradientChecker

MAX_MAIN_GRAD_BYTES = 8 << 30  # beyond, nothing is added to fp32 gradients
MAIN_GRAD = 0.5  # what they hold before
OTHER_CTAS = 4  # of emulate, which has 2
ZERO_ROWS = {"bf16": 64, "e4m3": 128}  # an expert's rows are filled up to a multiple with zeros
EMULATED = ("row_weight", "d_s", "dx_rows")


def made_of(problem: megamoe.Problem) -> tuple[str, ...]:
    """Return the gradients that a layer has."""
    without = ("dw13", "dw2") * problem.formats.packed + ("db13", "db2") * (not problem.bias)
    return tuple(name for name in GRADIENTS if name not in without)


def through_backend(
    backend: Any, d: Drawn, into: Any = None, wanted: tuple[str, ...] = GRADIENTS
) -> tuple[Any, ...]:
    """Return y, the gradients by name, and the state, of a forward that saves and a backward. Collective.

    wanted: gradients; of the experts alone: by a launch that makes no others.
    """
    (x, ids, scores), dy, masters = d.own, d.dy[d.me.rank], d.given
    needs = [name in wanted and name in made_of(d.problem) for name in GRADIENTS]
    y, state = backend.forward(Call(x, ids, scores, d.weights, d.live), keep=True)
    alone = not any(needs[:2])
    asked = GradRequest(Needs(*needs), into or {}, only_weights=alone, transposed=d.transposed)
    found = backend.backward(Call(x, ids, scores, masters, d.live), dy, state, asked)
    return y, dict(zip(GRADIENTS, found, strict=True)), state


def through_autograd(backend: str, d: Drawn) -> tuple[Tensor, Gradients]:
    """Return y and the gradients that torch has of a layer over this backend. Collective."""
    (x, ids, scores), dy = d.own, d.dy[d.me.rank]
    made = {n: t for n, t in d.given.named().items() if f"d{n}" in made_of(d.problem)}
    masters = replace(d.given, **{n: t.clone().requires_grad_() for n, t in made.items()})
    x, scores = x.clone().requires_grad_(), scores.clone().requires_grad_()
    layer = megamoe.Layer(d.problem, d.me.group or "alone", backend=backend)
    try:
        with torch.enable_grad():
            y = layer(x, ids, scores, masters, num_tokens_device=d.live)
            y.backward(dy)
        layer.check()
    finally:
        layer.close()
    leaves = (x, scores, masters.w13, masters.w2, masters.b13, masters.b2)
    found = [None if leaf is None else leaf.grad for leaf in leaves]
    return y.detach(), dict(zip(GRADIENTS, found, strict=True))


def saved_gate_up(
    backend: Any, problem: megamoe.Problem, state: Tensor | None, options: dict[str, Any]
) -> Tensor | None:
    """Return [M, P*I] bf16 as a forward saved it, by pool row; None where the state has none of all rows."""
    if state is None or int(backend.statistics().passes) > 1:
        return None
    plan = getattr(backend, "plan", None)
    if plan is None:
        rows = options.get("pool_rows") or megamoe.memory_report(problem)["pool_rows"]
        plan = Plan(problem, rows)
    if state.numel() != plan.train_state.bytes:
        return None  # another backend's
    return plan.train_state["gu"].view(state).flatten(1)


def check_backward(case: Case, me: Rank, args: argparse.Namespace) -> GradientChecker:
    """Run forward and backward of one case on this rank, compare every gradient. Collective."""
    problem = case.problem(me.rank)
    options = case.options()
    backend = make_backend(args.backend, problem, me.group, device=me.device, **options)
    flips = case.clamp is not None and (problem.formats.x.scaled or not backend.recomputes)
    checker = GradientChecker(problem, args.verbose, flips, case.weight_gradients)
    try:
        d = Drawn(case, me)
        oracle, saved = Oracle(d), None
        stages: dict[str, Tensor] = {}
        if not backend.recomputes:
            backend.prepare(d.weights)
            y, found, state = through_backend(backend, d)
            saved = saved_gate_up(backend, problem, state, options)
            saved = saved if on_all_ranks(saved is not None, me) else None
            if saved is not None:  # the launches that follow overwrite the stages
                stages = backward_stages(backend, me, problem.bias)
                if problem.formats.packed and not problem.bias:
                    stages.pop("x_rows", None)  # which weights' gradients alone are made of
            passes = int(backend.statistics().passes)
            compare_all(checker, oracle, found, stages, saved, passes)
            if stages and saved is not None:
                check_everywhere(checker, d, found, stages, saved)
            del state, saved, stages
            d.forget_others()
            check_again(checker, backend, d, y, found, args.repeat)
            backend.check()
            if args.fewer_sms:
                check_fewer_sms(checker, d, y, found, args)
        else:
            y, found = through_autograd(args.backend, d)
            compare_all(checker, oracle, found, {}, None)
            for call in range(1, args.repeat):
                same_gradients(
                    checker, found, through_autograd(args.backend, d)[1], f"call {call + 1}"
                )
    finally:
        backend.close()
    check_zeros(checker, d, found)
    return checker


def on_all_ranks(condition: bool, me: Rank) -> bool:
    """Return whether the condition holds on every rank. Collective."""
    every = torch.tensor([condition], dtype=torch.int32, device=me.device)
    if me.size > 1:
        dist.all_reduce(every, op=dist.ReduceOp.MIN)
    return bool(every)


def backward_stages(backend: Any, me: Rank, bias: bool) -> dict[str, Tensor]:
    """Return copies of what the last launch left, by the oracle's names, where the backend shows it. Collective."""
    found: dict[str, Tensor] = getattr(backend, "intermediates", dict)()
    if hasattr(backend, "emulation"):
        found = emulated_stages(backend, me)
    shown = {name: found[name].clone() for name in BACKWARD_STAGES if name in found}
    if "dgu" not in shown:
        return {}
    shown["dgu"] = shown["dgu"].flatten(1)
    parts = shown["d_s"] if bias else shown["d_s"][:, :-1]  # by tile; the last is b2's
    shown["d_s"] = parts.sum(1)
    return shown


def emulated_stages(backend: Any, me: Rank) -> dict[str, Tensor]:
    """Do the same of all ranks on rank 0, which has them; each takes its own."""
    found: list[Any] = [None] * me.size
    if me.is_first:
        for rank in range(me.size):
            found[rank] = {name: backend.emulation.region(rank, name) for name in EMULATED}
            found[rank] |= backend.emulation.operands(rank)
            found[rank]["partials"] = backend.emulation.region(rank, "window_partials")
    if me.size > 1:
        dist.broadcast_object_list(found, src=0)
    return found[me.rank]


def compare_all(
    checker: GradientChecker,
    oracle: Oracle,
    found: Gradients,
    stages: dict[str, Tensor],
    saved: Tensor | None,
    passes: int | None = None,
) -> None:
    """Compare with the oracle that rounds as the kernel, if one took so many passes, and with fp32.

    Without saved pre-activations (several passes) both make them again, from what forward multiplied.
    """
    rank = oracle.rank
    own = oracle.kept[rank]
    if passes is not None:
        gate_up = None if saved is None else oracle.shared_gate_up(saved)
        want = oracle.of_tokens("kernel", gate_up)
        formats = oracle.d.problem.formats
        if passes > 1 and formats.dy != formats.x:
            # Later passes compute pre-activations of x in bf16, not in e4m3 as forward.
            checker.products = "fp8"
        for name in ("dx", "d_topk_weights"):
            size = size_of(want, name, rank)
            checker.compare_kernel(name, found[name][own], want[name][rank], size=size)
        if saved is not None:
            compare_stages(checker, oracle, stages | {"gate_up": saved}, want)
        del want
        as_the_kernel = partial(checker.compare_kernel, passes=passes)
        compare_experts(as_the_kernel, oracle, found, oracle.of_experts("kernel", saved))
    want = oracle.of_tokens("none")
    for name in ("dx", "d_topk_weights"):
        checker.compare_fp32(name, found[name][own], want[name][rank])
    del want
    rows = int(oracle.d.rows[rank].counts.sum(0)[oracle.experts].sum())
    in_fp32 = partial(checker.compare_fp32, roundings=rows * oracle.d.problem.intermediate)
    compare_experts(in_fp32, oracle, found, oracle.of_experts("none"))


def compare_experts(
    compare: Callable[[str, Tensor, Tensor], None],
    oracle: Oracle,
    found: Gradients,
    want: Gradients,
) -> None:
    for name in OF_EXPERTS:
        if want[name] is None or name not in made_of(oracle.d.problem):
            continue
        got = found[name][oracle.experts].reshape(want[name].shape)
        compare(name, got, want[name])


def size_of(want: dict[str, list[Any]], name: str, rank: int) -> Tensor | None:
    """Return the size of the terms that sum to a result, which may cancel; None for other results."""
    sizes = want.get(f"{name}_size")
    return None if sizes is None else sizes[rank]


def compare_stages(
    checker: GradientChecker, oracle: Oracle, stages: dict[str, Tensor], want: dict[str, list[Any]]
) -> None:
    """Compare what this rank computed as expert rank, in the rows of the kept tokens, and the partials it was sent."""
    d, rank = oracle.d, oracle.rank
    rows = want["rows"][rank]
    expected = {name: want[name][rank] for name in BACKWARD_STAGES}
    expected["gate_up"] = oracle.forward("kernel", d.valid_ids)["gate_up"][rank].bfloat16()
    for name in BACKWARD_STAGES:
        if name in stages and name != "partials":
            size = size_of(want, name, rank)
            checker.compare_kernel(name, stages[name][rows.pool_row], expected[name], size=size)
    if "partials" in stages:
        checker.compare_kernel("partials", *oracle.partials(stages["partials"], want))
    for name in ("dy_rows", "x_rows"):
        if name in stages:
            behind = stages[name][rows_behind(d.rows[rank], ZERO_ROWS[d.case.weight_gradients])]
            checker.require(
                bool((behind == 0).all()), f"{name}: a row behind an expert's last is not zero"
            )


def rows_behind(rows: Rows, unit: int) -> Tensor:
    """Return the pool rows behind each expert's last, up to a multiple of `unit`: their products have to be zeros."""
    counts = rows.counts.sum(0)
    padded = -(-counts // 128) * 128
    first = padded.cumsum(0) - padded
    ends = zip(first.tolist(), counts.tolist(), strict=True)
    parts = [torch.arange(a + n, a + -(-n // unit) * unit) for a, n in ends]
    return torch.cat(parts).to(counts.device) if parts else counts[:0]


def check_again(
    checker: GradientChecker, backend: Any, d: Drawn, y: Tensor, found: Gradients, repeat: int
) -> None:
    """Compare with further calls, and with y of a forward that saves nothing, bit by bit; then gradients added to fp32.

    Collective.
    """
    x, ids, scores = d.own
    plain, _ = backend.forward(Call(x, ids, scores, d.weights, d.live))
    same = same_bits(plain[: d.num_live], y[: d.num_live])
    checker.require(same, "y is another one where forward saves")
    for call in range(1, repeat):
        same_gradients(checker, found, through_backend(backend, d)[1], f"call {call + 1}")
    _, alone, _ = through_backend(backend, d, wanted=GRADIENTS[:2])
    checker.require(
        all(alone[name] is None for name in OF_EXPERTS), "gradients that nobody needed came back"
    )
    same_gradients(checker, found, alone, "without weight gradients", GRADIENTS[:2])
    made = made_of(d.problem)[2:]
    if not made:
        return
    _, weights, _ = through_backend(backend, d, wanted=OF_EXPERTS)
    same_gradients(checker, found, weights, "weight gradients alone", OF_EXPERTS)
    named = {n: t for n, t in d.given.named().items() if f"d{n}" in made}
    if 4 * sum(t.numel() for t in named.values()) > MAX_MAIN_GRAD_BYTES:
        return
    into = {n: torch.full_like(t, MAIN_GRAD, dtype=torch.float32) for n, t in named.items()}
    _, added, _ = through_backend(backend, d, into)
    passes = int(backend.statistics().passes)
    for name, main in into.items():
        checker.require(added[f"d{name}"] is None, f"d{name} came back although it was added")
        checker.compare_added(f"d{name}", main - MAIN_GRAD, found[f"d{name}"].float(), passes)


def check_fewer_sms(
    checker: GradientChecker, d: Drawn, y: Tensor, found: Gradients, args: argparse.Namespace
) -> None:
    """Compare bits with those of another grid. Collective."""
    grid = {"reserve_sms": args.fewer_sms, "num_ctas": OTHER_CTAS, **d.case.options()}
    other = make_backend(args.backend, d.problem, d.me.group, device=d.me.device, **grid)
    try:
        other.prepare(d.weights)
        again, gradients, _ = through_backend(other, d)
        other.check()
    finally:
        other.close()
    same = same_bits(again[: d.num_live], y[: d.num_live])
    checker.require(same, "another grid: other bits of y")
    same_gradients(checker, found, gradients, "another grid")


def same_gradients(
    checker: GradientChecker,
    found: Gradients,
    again: Gradients,
    what: str,
    names: tuple[str, ...] = GRADIENTS,
) -> None:
    for name in names:
        if found[name] is not None:
            good = again[name] is not None and same_bits(found[name], again[name])
            checker.require(good, f"{what}: other bits of {name}")


def check_zeros(checker: GradientChecker, d: Drawn, found: Gradients) -> None:
    """Exact zeros where nothing was routed, and nothing that is not finite."""
    ids, rows = d.valid_ids[d.me.rank], d.rows[d.me.rank]
    dropped = (ids < 0) | (ids >= d.problem.num_experts)
    empty = rows.counts.sum(0) == 0
    where = {"dx": dropped.all(-1), "d_topk_weights": dropped} | dict.fromkeys(OF_EXPERTS, empty)
    for name, gradient in found.items():
        if gradient is None:
            continue
        checker.require(
            bool((gradient[where[name]] == 0).all()), f"{name} is not zero where nothing was routed"
        )
        checker.require(bool(gradient.isfinite().all()), f"{name} has values that are not finite")
