"""Forward of a case on one rank: stage by stage where the backend shows its stages, and y against fp32."""

import argparse

from torch import Tensor

from bench.check.cases import Case
from bench.check.oracle import Drawn, Oracle
from bench.ranks import Rank
from megamoe.backends.call import Call
from megamoe.backends.select import make_backend
from megamoe.testing import same_bits
from megamoe.testing.intermediates import ENOUGH, FP32_LIMIT, STAGES, StageChecker


def check_forward(case: Case, me: Rank, args: argparse.Namespace) -> StageChecker:
    """Run forward of one case on this rank. Collective."""
    problem = case.problem(me.rank)
    # before the weights are drawn: a backend that cannot run here says so at once
    options = case.options()
    backend = make_backend(args.backend, problem, me.group, device=me.device, **options)
    try:
        d = Drawn(case, me)
        oracle, checker = Oracle(d), StageChecker(problem, args.verbose)
        x, ids, scores = d.own
        backend.prepare(d.weights)
        call = Call(x, ids, scores, d.weights)
        y = backend.forward(call)[0].clone()
        stages = getattr(backend, "intermediates", dict)() | {"y": y}
        compare_stages(checker, oracle, stages)
        compare_fp32(checker, oracle, y)
        for repeat in range(1, args.repeat):
            again, _ = backend.forward(call)
            checker.require(
                same_bits(again, y), f"call {repeat + 1} gives other bits than the first"
            )
        backend.check()
    finally:
        backend.close()
    dropped = ((ids < 0) | (ids >= problem.num_experts)).all(-1)
    checker.require(bool((y[dropped] == 0).all()), "y of a token without a route is not zero")
    checker.require(bool(y.isfinite().all()), "y has values that are not finite")
    return checker


def compare_stages(checker: StageChecker, oracle: Oracle, stages: dict[str, Tensor]) -> None:
    """Compare what this rank computed as expert rank, and as home rank x_q, y and the partials it was sent."""
    me, want = oracle.rank, oracle.forward("kernel", oracle.d.ids)
    # The oracle holds the kept tokens and their rows only.
    rows, home = want["rows"][me], oracle.kept[me]
    where = {"x_q": home, "x_scale": home, "y": home}
    names = [name for name in STAGES if name in stages and name in want]
    expected = {name: want[name][me] for name in names}
    got = {n: stages[n][where.get(n, rows.pool_row)] for n in names if n != "partials"}
    if "partials" in names:
        got["partials"], expected["partials"] = oracle.partials(stages["partials"], want)
    routes = {"y": sum(int((r.home == me).sum()) for r in want["rows"])}
    for name in names:
        checker.compare_stage(name, got, expected, routes.get(name, rows.token.numel()))


def compare_fp32(checker: StageChecker, oracle: Oracle, y: Tensor) -> None:
    """Compare y with fp32 throughout on unquantized weights and x: the price of all roundings."""
    me, problem = oracle.rank, oracle.d.problem
    want = oracle.forward("none", oracle.d.ids)
    routes = sum(rows.token.numel() for rows in want["rows"])
    elements = min(want["y"][me].numel(), routes * problem.intermediate)
    strict = not (problem.formats.h.scaled or problem.formats.w.scaled) and elements >= ENOUGH
    limit = FP32_LIMIT if strict else float("inf")
    checker.judge("y_fp32", y[oracle.kept[me]], want["y"][me], limit)
