"""What a rank's results are compared with: the inputs of every rank, their layer and their gradients by the oracle."""

from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.check.cases import Case, release_memory
from bench.ranks import Rank
from megamoe import ExpertWeights, Problem
from megamoe.backends import reference
from megamoe.backends.call import Call
from megamoe.backends.reference.layer import keep_rows
from megamoe.backends.reference.route import Rows, route
from megamoe.formats.weights import TransposedWeights
from megamoe.testing.gradients import OF_EXPERTS

CHECKED_ELEMENTS = 1 << 27  # of dw13 and dw2: sampled experts of a rank


class Drawn:
    """What every rank feeds the layer and its backward pass, as this rank draws it."""

    def __init__(self, case: Case, me: Rank) -> None:
        self.case, self.me, self.problem = case, me, case.problem(me.rank)
        ranks = range(me.size)
        inputs = [case.inputs(rank, me.device) for rank in ranks]
        self.x, self.scores = [i.x for i in inputs], [i.topk_weights for i in inputs]
        self.ids = [i.topk_ids for i in inputs]
        self.masters = [case.masters(rank, me.device) for rank in ranks]
        self.live: Tensor | None = None
        self.valid_ids = self.ids  # as the oracle takes them
        if case.live is not None:
            counts = [torch.tensor([n], dtype=torch.int32, device=me.device) for n in case.live]
            self.live = counts[me.rank]
            calls = zip(self.x, self.ids, self.scores, self.masters, counts, strict=True)
            self.valid_ids = [Call(*call).computed_ids() for call in calls]

    @cached_property
    def dy(self) -> list[Tensor]:
        """All ranks' gradients of y."""
        return [self.case.dy(rank, self.me.device) for rank in range(self.me.size)]

    @cached_property
    def rows(self) -> list[Rows]:
        """Every rank's rows of the live tokens."""
        return [route(self.problem, rank, self.valid_ids) for rank in range(self.me.size)]

    @cached_property
    def weights(self) -> ExpertWeights:
        """This rank's, as forward takes them."""
        return self.masters[self.me.rank].quantized(self.problem)

    @cached_property
    def everyones(self) -> list[ExpertWeights]:
        """All ranks', as forward takes them."""
        mine = self.me.rank
        pairs = enumerate(self.masters)
        return [self.weights if r == mine else m.quantized(self.problem) for r, m in pairs]

    @cached_property
    def exact(self) -> list[ExpertWeights]:
        """All ranks', before roundings that gradients pass by: masters, or the numbers of packed ones in fp32."""
        if not self.problem.formats.packed:
            return self.masters
        return [w.dense(self.problem, torch.float32) for w in self.everyones]

    @property
    def given(self) -> ExpertWeights:
        """This rank's, as backward takes them."""
        return self.weights if self.problem.formats.packed else self.masters[self.me.rank]

    def forget_others(self) -> None:
        """Give back other ranks' quantized weights, which the oracle alone reads: two ranks' dsv3 fill a GPU."""
        for name in ("everyones", "exact"):
            self.__dict__.pop(name, None)
        release_memory(self.me.device)

    @cached_property
    def transposed(self) -> TransposedWeights | None:
        """What backward takes besides."""
        if not self.problem.formats.transposes:
            return None
        return TransposedWeights.of(self.problem, self.weights)

    @property
    def num_live(self) -> int:
        """Tokens of this rank that are computed."""
        mine = self.me.rank
        return len(self.x[mine]) if self.case.live is None else self.case.live[mine]

    @property
    def own(self) -> tuple[Tensor, Tensor, Tensor]:
        """x, ids and weights of this rank's tokens."""
        mine = self.me.rank
        return self.x[mine], self.ids[mine], self.scores[mine]


class Oracle:
    """What a layer and its gradients should be: of sampled tokens, and of sampled experts over all their rows.

    rounding: "kernel" rounds where the kernel does; "none" is fp32 throughout on the bf16 weights, for the own rank's
    tokens alone.
    """

    def __init__(self, d: Drawn) -> None:
        self.d, self.rank = d, d.me.rank
        self.kept = d.case.checked_tokens(d.me.device)

    @cached_property
    def experts(self) -> Tensor:
        """Return local experts of this rank, ascending: all, or the busiest and an even sample."""
        p = self.d.problem
        of_one = (p.activation.planes + 1) * p.hidden * p.intermediate
        local, most = p.num_local_experts(), max(CHECKED_ELEMENTS // of_one, 2)
        if local <= most:
            return torch.arange(local, device=self.d.me.device)
        busiest = self.d.rows[self.rank].counts.sum(0).argmax().view(1)
        even = torch.linspace(0, local - 1, most - 1, device=self.d.me.device).long()
        return torch.cat([even, busiest]).unique()

    def _given(self, rounding: str) -> tuple[Problem, list[ExpertWeights], list[Tensor]]:
        """Return the problem, all ranks' weights, and the tokens of each home rank to compute."""
        if rounding != "none":
            return self.d.problem, self.d.everyones, self.kept
        own = [t if rank == self.rank else t[:0] for rank, t in enumerate(self.kept)]
        return replace(self.d.problem, precision="bf16"), self.d.masters, own

    def forward(self, rounding: str, ids: list[Tensor]) -> dict[str, list[Any]]:
        """Return y and all intermediates of the kept tokens. ids: of every rank, all or the live ones."""
        problem, weights, kept = self._given(rounding)
        call = self.d.x, ids, self.d.scores, weights
        return reference.forward(problem, *call, rounding=rounding, check_tokens=kept)

    def of_tokens(self, rounding: str, gate_up: list[Tensor] | None = None) -> dict[str, list[Any]]:
        """Return gradients, and the stages of backward, of the kept tokens."""
        d, (problem, weights, kept) = self.d, self._given(rounding)
        weights = d.exact if rounding == "none" else weights
        call = d.dy, d.x, d.valid_ids, d.scores, weights
        return reference.backward(
            problem, *call, rounding=rounding, gate_up=gate_up, check_tokens=kept,
            weight_gradients=self._products(problem),
        )  # fmt: skip

    def _products(self, problem: Problem) -> str:
        asked, known = self.d.case.weight_gradients, problem.formats.weight_gradients
        return asked if asked in known else known[0]

    def partials(self, found: Tensor, want: dict[str, list[Any]]) -> tuple[Tensor, Tensor]:
        """Return the partials that this rank was sent for kept tokens: as found, and as they should be.

        One exists for a token that has a row on the rank that sends. found: by that rank, and by token of this one.
        """
        first, home = sum(t.numel() for t in self.kept[: self.rank]), self.kept[self.rank]
        owed = [rows.token[rows.home == self.rank].unique() for rows in want["rows"]]
        got = [found[rank][home[tokens - first]] for rank, tokens in enumerate(owed)]
        sent = [want["partials"][rank][tokens] for rank, tokens in enumerate(owed)]
        return torch.cat(got), torch.cat(sent)

    def of_experts(self, rounding: str, saved: Tensor | None = None) -> dict[str, Tensor | None]:
        """Return dw13, dw2, db13 and db2 of the sampled experts of this rank.

        As a problem of those experts alone, on one rank that is the home of all tokens. saved: [M, P*I] by pool row.
        """
        d, experts = self.d, self.experts
        p, device, num = d.problem, d.me.device, experts.numel()
        if num == 0:
            return dict.fromkeys(OF_EXPERTS)
        begin, local = p.expert_begin(), p.num_local_experts()
        position = torch.full((local,), -1, device=device)
        position[experts] = torch.arange(num, device=device)
        ids = torch.cat([i.long() for i in d.valid_ids]) - begin
        inside = (ids >= 0) & (ids < local)
        ids = torch.where(inside, position[ids.clamp(0, local - 1)], -1)
        alone = replace(
            p, num_experts=num, ep_size=1, rank=0, max_tokens=max(1, ids.shape[0]),
            precision="bf16" if rounding == "none" else p.precision,
        )  # fmt: skip
        weights = d.exact[self.rank] if rounding == "none" else d.weights
        weights = replace(weights, **{n: t[experts] for n, t in weights.named().items()})
        gate_up = None
        if saved is not None:
            full, rows = d.rows[self.rank], route(alone, 0, [ids])
            pool_row = torch.full((ids.numel(),), -1, device=device)
            pool_row[full.token * p.top_k + full.k] = full.pool_row
            gate_up = [saved[pool_row[rows.token * p.top_k + rows.k]]]
        dy, x, scores = ([torch.cat(column)] for column in (d.dy, d.x, d.scores))
        found = reference.backward(
            alone, dy, x, [ids], scores, [weights], rounding=rounding, gate_up=gate_up,
            weight_gradients=self._products(alone),
        )  # fmt: skip
        return {name: found[name][0] for name in OF_EXPERTS}

    def shared_gate_up(self, saved: Tensor) -> list[Tensor]:
        """Return the saved pre-activations of the kept tokens' rows of every rank. Collective.

        saved: [M, P*I] by pool row, of this rank.
        """
        d, gathered = self.d, []
        for rank, rows in enumerate(keep_rows(d.rows, d.ids, self.kept)):
            part = saved.new_empty(rows.token.numel(), saved.shape[1])
            if rank == self.rank:
                part.copy_(saved[rows.pool_row])
            if d.me.size > 1 and part.numel():
                dist.broadcast(part.view(torch.uint8), src=rank)
            gathered.append(part)
        return gathered
