"""A training call on the emulated machine: its tensors, its launches, and a judge of everything that backward left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from calls import calls_of
from torch import Tensor

from megamoe.backends.call import GradRequest, Needs
from megamoe.backends.emulate.emulation import Emulation
from megamoe.backends.reference.backward import backward
from megamoe.backends.reference.layer import forward
from megamoe.backends.reference.route import BLOCK, CHUNK, Rows
from megamoe.core.config import Problem
from megamoe.formats.weights import ExpertWeights
from megamoe.launch import layout
from megamoe.testing.gradients import GRADIENTS, GradientChecker
from megamoe.testing.inputs import Inputs, make_inputs, make_weights

GROUP = 64  # an expert's rows are filled up to a multiple of it, by rows of zeros; to BLOCK for e4m3 products


@dataclass
class Call:
    """What all ranks bring to a forward pass and the backward pass of it."""

    problem: Problem
    inputs: list[Inputs]
    masters: list[ExpertWeights]
    dys: list[Tensor]

    @classmethod
    def make(
        cls,
        problem: Problem,
        tokens: Sequence[int],
        *,
        seed: int = 0,
        scale: float = 1.0,
        **options: Any,
    ) -> Call:
        """scale: of x; large ones reach the clamps. options: of make_inputs."""
        ranks = [replace(problem, rank=r) for r in range(problem.ep_size)]
        pairs = list(zip(ranks, tokens, strict=True))
        inputs = [make_inputs(p, t, seed=seed, **options) for p, t in pairs]
        for i in inputs:
            i.x.mul_(scale)
        dys = [make_inputs(p, t, seed=seed + 1000).x for p, t in pairs]
        return cls(problem, inputs, [make_weights(p, seed=1, quantize=False) for p in ranks], dys)

    @property
    def weights(self) -> list[ExpertWeights]:
        """As forward takes them."""
        ranks = range(self.problem.ep_size)
        return [self.masters[r].quantized(replace(self.problem, rank=r)) for r in ranks]

    @property
    def routed(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """x, topk_ids, topk_weights."""
        i = self.inputs
        return [r.x for r in i], [r.topk_ids for r in i], [r.topk_weights for r in i]

    def forward(
        self, emulation: Emulation, counts: Sequence[Tensor] | None = None, **options: Any
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return y and state. counts: num_tokens_device of each rank."""
        return emulation.train_all(calls_of(*self.routed, self.weights, counts), **options)

    def backward(
        self,
        emulation: Emulation,
        states: Sequence[Tensor],
        wanted: Sequence[GradRequest] | None = None,
        counts: Sequence[Tensor] | None = None,
        **options: Any,
    ) -> list[list[Tensor | None]]:
        """Return the gradients of each rank."""
        calls = calls_of(*self.routed, self.masters, counts)
        return list(map(list, emulation.backward_all(calls, self.dys, states, wanted, **options)))


def least_pool(problem: Problem) -> int:
    return max(layout.min_pool_rows(replace(problem, rank=r)) for r in range(problem.ep_size))


def check(emulation: Emulation, call: Call, **options: Any) -> list[list[Tensor | None]]:
    """Run both launches, judge all that they left, return the gradients; of several passes, fp32 sums."""
    _, states = call.forward(emulation, **options)
    passes = [int(emulation.statistics(r).passes) for r in range(call.problem.ep_size)]
    into: list[dict[str, Tensor]] = []
    if max(passes) > 1:
        into = [{"w13": zeros(w.w13), "w2": zeros(w.w2)} for w in call.masters]
    grads = call.backward(emulation, states, adding_to(into) if into else None, **options)
    for of_rank, sums in zip(grads, into, strict=False):
        of_rank[2:4] = sums["w13"], sums["w2"]
    judge(emulation, call, states, grads)
    return grads


def adding_to(into: Sequence[dict[str, Tensor]]) -> list[GradRequest]:
    """Return what ranks want that add gradients to these, by name."""
    return [GradRequest(into=sums) for sums in into]


def needing(*needs: Sequence[bool]) -> list[GradRequest]:
    """Return what ranks want that need these gradients."""
    return [GradRequest(Needs(*of_rank)) for of_rank in needs]


def zeros(master: Tensor) -> Tensor:
    return torch.zeros(master.shape, dtype=torch.float32)


def judge(
    emulation: Emulation,
    call: Call,
    states: Sequence[Tensor],
    grads: Sequence[Sequence[Tensor | None]],
    regions: bool = True,
) -> None:
    """Compare the gradients, and what the launch left in memory, with the oracle's; raise for all that differs.

    regions: whether the workspace still has what this call's backward left. bf16 sums over several passes are rounded
    after each of them: dw13 and dw2 must be fp32 then.
    """
    problem = call.problem
    xs, ids, scores = call.routed
    given = (problem, call.dys, xs, ids, scores, call.weights)
    recomputed = backward(*given)
    passes = [
        first_pass(rows, ids, problem.ep_size, emulation.ranks[r].plan.pool_rows)
        for r, rows in enumerate(recomputed["rows"])
    ]
    gate_up = []
    for r, (mine, pool_row) in enumerate(passes):
        mixed = recomputed["gate_up"][r].clone()
        plan = emulation.ranks[r].plan
        mixed[mine] = plan.train_state["gu"].view(states[r])[pool_row].flatten(1)
        gate_up.append(mixed)
    types = {g.dtype for of_rank in grads for g in of_rank[2:4] if g is not None}
    products = emulation.weight_gradients
    expected = backward(*given, gate_up=gate_up, dw_dtype=types.pop(), weight_gradients=products)
    checker = GradientChecker(problem, verbose=True, weight_gradients=products)
    saved = forward(problem, xs, ids, scores, call.weights)["gate_up"]
    for r, (mine, pool_row) in enumerate(passes):
        _judge_state(checker, emulation, call, states[r], r, pool_row)
        checker.compare_kernel("gate_up", gate_up[r][mine], saved[r][mine].bfloat16())
        if regions and bool(mine.all()):
            checker.lines.append(f"rank {r}")
            _judge_regions(checker, emulation, expected, r)
    for r, of_rank in enumerate(grads):
        checker.lines.append(f"gradients of rank {r}")
        for name, got in zip(GRADIENTS, of_rank, strict=True):
            wanted = expected[name][r]
            if wanted is None:
                checker.require(got is None, f"{name}: there is no bias, but a gradient of it")
            elif got is None:
                checker.require(False, f"{name} is None")
            else:
                checker.compare_kernel(name, got, wanted.to(got.dtype))
    assert checker.good, "\n".join(["", *checker.lines])


def first_pass(
    rows: Rows, topk_ids: Sequence[Tensor], ranks: int, pool_rows: int
) -> tuple[Tensor, Tensor]:
    """Return which rows are in the first pass [M] bool, and their rows of the pool."""
    counts, end = rows.counts, rows.counts.shape[0]

    def padded(chunks: int) -> Tensor:
        return -(-counts[:chunks].sum(0) // BLOCK) * BLOCK

    while int(padded(end).sum()) > pool_rows:
        end -= 1
    begins = torch.tensor([0] + [t.shape[0] for t in topk_ids]).cumsum(0)
    chunk = (rows.token - begins[rows.home]) // CHUNK * ranks + rows.home
    mine = chunk < end
    expert = rows.expert[mine]
    start = padded(end).cumsum(0) - padded(end)
    before = counts[:end].sum(0).cumsum(0) - counts[:end].sum(0)
    return mine, start[expert] + torch.arange(expert.numel()) - before[expert]


def _judge_state(
    checker: GradientChecker,
    emulation: Emulation,
    call: Call,
    state: Tensor,
    rank: int,
    pool_row: Tensor,
) -> None:
    """The header, and x of every token of another rank that has a route here, once."""
    plan = emulation.ranks[rank].plan
    regions = plan.train_state.views(state)
    begun, complete, pool_rows, _, *tokens = regions["header"].tolist()
    ranks = call.problem.ep_size
    checker.require(begun == complete > 0, f"header: begun {begun}, complete {complete}")
    checker.require(pool_rows == plan.pool_rows, f"header: {pool_rows} pool rows")
    expected = [i.x.shape[0] for i in call.inputs]
    checker.require(tokens[:ranks] == expected, f"header: tokens {tokens}, expected {expected}")
    scaled = call.problem.formats.x.scaled
    out = forward(call.problem, *call.routed, call.weights) if scaled else {}
    for home, inputs in enumerate(call.inputs):
        if home == rank and not scaled:
            continue
        slot = home if scaled else home - (home > rank)
        begin = call.problem.expert_begin(rank)
        local = inputs.topk_ids - begin
        routed = ((local >= 0) & (local < call.problem.num_local_experts(rank))).any(1)
        routed = torch.nonzero(routed).flatten()
        x = out["x_q"][home] if scaled else inputs.x
        got = regions["tokens"][slot, routed]
        same = torch.equal(got.view(torch.uint8), x[routed].view(torch.uint8))
        checker.require(same, f"tokens of rank {home} saved on rank {rank} are not x")
        if scaled:
            same = torch.equal(regions["tokens_scale"][slot, routed], out["x_scale"][home][routed])
            checker.require(
                same, f"scales of rank {home}'s tokens saved on rank {rank} are not x's"
            )


def _judge_regions(
    checker: GradientChecker, emulation: Emulation, expected: dict[str, list[Any]], rank: int
) -> None:
    rows: Rows = expected["rows"][rank]
    zero = _zero_rows(rows, BLOCK if emulation.weight_gradients == "e4m3" else GROUP)
    found = emulation.operands(rank)
    found |= {name: emulation.region(rank, name) for name in ("dx_rows", "row_weight")}
    for name, values in found.items():
        if name != "dx_rows":
            checker.require(not bool(values[zero].any()), f"{name}: rows of zeros are not zero")
    d_s = emulation.region(rank, "d_s")
    found["d_s"] = (d_s if emulation.problem.bias else d_s[:, :-1]).sum(1)  # the last is b2's part
    for name in ("dy_rows", "x_rows", "row_weight", "dgu", "hs", "d_s", "dx_rows"):
        got = found[name][rows.pool_row]
        checker.compare_kernel(name, got, expected[name][rank].to(got.dtype))
    got, wanted = [], []
    for home in range(len(expected["dx"])):  # what this rank put into the windows of tokens' homes
        begin = sum(t.shape[0] for t in expected["dx"][:home])
        token = rows.token[rows.home == home].unique()
        got.append(emulation.region(home, "window_partials")[rank, token - begin])
        wanted.append(expected["partials"][rank][token])
    checker.compare_kernel("partials", torch.cat(got), torch.cat(wanted))


def _zero_rows(rows: Rows, unit: int = GROUP) -> Tensor:
    """Return the pool rows behind each expert's last, up to a multiple of `unit`."""
    found = []
    for e in rows.expert.unique().tolist():
        mine = rows.pool_row[rows.expert == e]
        first, last = int(mine.min()), int(mine.max())
        end = first + -(-(last + 1 - first) // unit) * unit
        found.append(torch.arange(last + 1, end))
    return torch.cat(found) if found else rows.pool_row


def pretend(emulation: Emulation, call: Call) -> tuple[list[Tensor], list[list[Tensor | None]]]:
    """Leave what a kernel in a single pass must leave, without one: the oracle's. Return states and gradients."""
    problem, ranks = call.problem, range(call.problem.ep_size)
    xs, ids, scores = call.routed
    saved = forward(problem, xs, ids, scores, call.weights)
    gate_up = [g.bfloat16() for g in saved["gate_up"]]
    out = backward(problem, call.dys, xs, ids, scores, call.weights, gate_up=gate_up)
    states = []
    for r in ranks:
        plan, rows = emulation.ranks[r].plan, out["rows"][r]
        state = torch.full((plan.train_state.bytes,), 0xFF, dtype=torch.uint8)
        regions = plan.train_state.views(state)
        tokens = [x.shape[0] for x in xs]
        header = torch.tensor([1, 1, plan.pool_rows, 0, *tokens], dtype=torch.int32)
        regions["header"][: header.numel()] = header
        regions["gu"].flatten(1)[rows.pool_row] = gate_up[r]
        for h in ranks:
            if "tokens_scale" in regions:
                regions["tokens"][h, : tokens[h]] = saved["x_q"][h]
                regions["tokens_scale"][h, : tokens[h]] = saved["x_scale"][h]
            elif h != r:
                regions["tokens"][h - (h > r), : tokens[h]] = xs[h]
        states.append(state)
        for name in ("dy_rows", "x_rows", "dgu", "hs", "dx_rows", "row_weight"):
            region = emulation.region(r, name)
            region = region.flatten(1) if region.dim() > 1 else region
            region[_zero_rows(rows)] = 0
            region[rows.pool_row] = out[name][r].to(region.dtype)
        d_s = emulation.region(r, "d_s").zero_()
        d_s[rows.pool_row, 0] = out["d_s"][r]
        begin = 0
        for h in ranks:
            partials = out["partials"][r][begin : begin + tokens[h]]
            emulation.region(h, "window_partials")[r, : tokens[h]] = partials
            begin += tokens[h]
    return states, [[out[name][r] for name in GRADIENTS] for r in ranks]
