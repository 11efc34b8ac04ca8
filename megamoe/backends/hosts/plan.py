"""Plan which rows of a call travel to which host and back, and what the hosts exchange before.

DynamicCounts: only the needed rows travel, by counts, for which the host waits once per pass. FixedCapacity: every
token travels to every host in a fixed number of slots; nothing waits, and a CUDA graph can capture it. Both compute
the same rows, and in the same order if gradients are recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megamoe.backends.rail import Exchange, exchange_counts
from megamoe.core.config import Problem
from megamoe.group.order import BACKWARD, MARK_INTS, RECORDED, Mark, check_marks, check_numbers
from megamoe.launch.launches import refuse_capture


class DispatchPlan(NamedTuple):
    """Say which rows of a call go where. Rows are in order of chunks, those of a chunk in order of hosts.

    tokens: token of each row to send. Before confirm() the tail is padding with arbitrary tokens.
    places: [T * N], which row of what comes back each host has made of a token; 0: of no token. send, receive: how many
    rows to and from each host, by chunk; before confirm() all that there could be. slots: FixedCapacity: tokens, but T
    where there is none, which hold any row in `tokens`, and T + 1 of marks, which are sent like another chunk.
    counts: DynamicCounts: `send`, [C, N].
    """

    tokens: Tensor
    places: Tensor
    send: list[list[int]]
    receive: list[list[int]]
    slots: Tensor | None = None
    counts: Tensor | None = None


class Numbers(NamedTuple):
    """What indices are made of, where the tensors of calls lie."""

    begins: Tensor  # [N + 1] int32: the first expert of each host, and E
    hosts: Tensor  # [N, 1, 1], from 1, as torch.bucketize counts
    slots: Tensor  # [slots of all chunks]
    bags: Tensor  # [max_tokens]: where in `places` a token begins
    counts: Tensor  # [C, N] in the host's memory


class Planner:
    """Plan the exchanges of one layer. A call makes begin(), pack_metadata(), confirm(), exchange(), in this order.

    problem: of all hosts. rail: the equal ranks of all hosts, of which this is number `host`. bounds: [N + 1], the
    first expert of each host, and E. groups: scales of a row as it travels. mark: of the layer. engine: what carries
    rows along the rail. device: where the tensors of calls lie.
    """

    waits: bool  # the host waits in a call, and a refusal is told at once

    def __init__(
        self,
        problem: Problem,
        rail: Any,
        bounds: Sequence[int],
        chunks: int,
        groups: int,
        mark: Mark,
        engine: Exchange,
    ) -> None:
        self.problem, self.rail, self.host, self.num_hosts = problem, rail, rail.rank, rail.size
        self.bounds, self.chunks, self.groups = bounds, chunks, groups
        self.mark, self.engine, self.device = mark, engine, torch.device("cpu")
        self.chunk = -(-problem.max_tokens // chunks)  # most tokens of a rank in one

    @cached_property
    def numbers(self) -> Numbers:
        """Made once; a graph cannot."""
        num, device, on_gpu = self.num_hosts, self.device, self.device.type == "cuda"
        made = Numbers(
            torch.tensor(self.bounds, dtype=torch.int32, device=device),
            torch.arange(1, num + 1, device=device).view(num, 1, 1),
            torch.arange(self.chunks * self.chunk, device=device),
            torch.arange(0, self.problem.max_tokens * num, num, device=device),
            torch.empty(self.chunks, num, dtype=torch.int64, device="cpu", pin_memory=on_gpu),
        )
        if on_gpu:  # other streams read them too
            torch.cuda.current_stream(device).synchronize()
        return made

    def begin(self, ids: Tensor) -> DispatchPlan:
        """Return the plan of a call. ids: [T, K] int32. No host waits: others queue work before confirm()."""
        raise NotImplementedError

    def pack_metadata(
        self, columns: list[Tensor], plan: DispatchPlan, flags: int, number: Tensor | None = None
    ) -> Tensor | None:
        """Return what goes beside the rows, [M, n] of 4 bytes, of all chunks; None: nothing.

        columns: [T, any] each. flags: of the call's mark. number: [1] int32, of the call that a backward pass belongs
        to. Ranks of a host may all take another than those of the next: inside their host nothing is wrong then.
        """
        raise NotImplementedError

    def confirm(self, plan: DispatchPlan, flags: int, number: Tensor | None = None) -> DispatchPlan:
        """Return the plan as hosts agree on it. RankMismatch where they come for different calls."""
        raise NotImplementedError

    def exchange(
        self, sent: Tensor | None, plan: DispatchPlan, columns: Sequence[Tensor]
    ) -> list[Tensor]:
        """Exchange what pack_metadata() made of the columns. Return what comes of each, as views, by chunk."""
        if sent is None:
            return []
        found, widths = self._exchanged(sent, plan), [t.shape[1] for t in columns]
        _, *of_columns = found.split([found.shape[1] - sum(widths), *widths], 1)
        return of_columns

    def _exchanged(self, sent: Tensor, plan: DispatchPlan) -> Tensor:
        """Exchange the rows of pack_metadata(). Return those that come, by chunk."""
        raise NotImplementedError

    def once(self, rows: Tensor, send: list[list[int]], receive: list[list[int]]) -> Tensor:
        """Exchange small rows of all chunks at once. They lie by chunk, and so does what comes."""
        totals = [[sum(of) for of in zip(*n, strict=True)] for n in (send, receive)]
        found = self.engine(_swap_levels(rows, send), *totals)()
        return _swap_levels(found, [*zip(*receive, strict=True)])

    def order(self, local: Tensor) -> Tensor | None:
        """Return the order in which the rows of a chunk are computed, None: as they came. local: [M, K], ids there."""
        return None

    def check_capture(self) -> None:
        """Raise MegaMoEError where a graph is captured that cannot hold a call."""

    def check(self) -> None:
        """Raise RankMismatch where hosts differed in a call before, as far as this host knows without waiting."""

    def check_all(self) -> None:
        """Do the same for all calls, and wait for them."""

    def abort(self, error: Exception) -> None:
        """Tell the other hosts, where they wait in the call that this rank does not make."""

    def reset(self) -> None:
        """Forget how hosts differed, and make anew what graphs read."""


class DynamicCounts(Planner):
    """Rows as needed. Hosts meet along the rail for how many will come: there each tells what it comes for."""

    waits = True

    def begin(self, ids: Tensor) -> DispatchPlan:
        (tokens, top_k), chunks, num = ids.shape, self.chunks, self.num_hosts
        numbers, part = self.numbers, -(-tokens // chunks)
        owner = torch.bucketize(ids, numbers.begins, right=True, out_int32=True)
        if part * chunks > tokens:
            owner = torch.nn.functional.pad(owner, (0, 0, 0, part * chunks - tokens))
        goes = (owner.view(chunks, 1, part, top_k) == numbers.hosts).any(3)  # [C, N, part]
        # How many come before a row says where it lies and, unlike for nonzero(), no host waits.
        places = goes.view(-1).cumsum(0).view(goes.shape) * goes
        taken = places.new_zeros(chunks * num * part + 1)
        taken[places] = numbers.slots[: part * chunks].view(chunks, 1, part)
        places = places.transpose(1, 2).reshape(-1)[: tokens * num]
        most = [[part] * num for _ in range(chunks)]
        return DispatchPlan(taken[1:], places, most, most, counts=goes.sum(2))

    def pack_metadata(
        self, columns: list[Tensor], plan: DispatchPlan, flags: int, number: Tensor | None = None
    ) -> Tensor | None:
        if len(columns) > 1:
            return torch.cat([t.view(torch.int32) for t in columns], 1)[plan.tokens]
        return columns[0][plan.tokens] if columns else None

    def confirm(self, plan: DispatchPlan, flags: int, number: Tensor | None = None) -> DispatchPlan:
        assert plan.counts is not None
        counts = self.numbers.counts
        counts.copy_(plan.counts, non_blocking=True)  # there when the others' are
        told = plan.counts.T
        _, found = exchange_counts(self.rail, self.mark.ints(flags), told, number)
        send, receive = counts.tolist(), found.T.tolist()
        tokens = plan.tokens[: sum(map(sum, send))]
        return plan._replace(tokens=tokens, send=send, receive=receive)

    def _exchanged(self, sent: Tensor, plan: DispatchPlan) -> Tensor:
        return self.once(sent[: len(plan.tokens)], plan.send, plan.receive)

    def check_capture(self) -> None:
        if self.device.type == "cuda":  # before ranks meet: all capture
            refuse_capture('a graph cannot capture exchange="exact": make the layer with "static"')

    def abort(self, error: Exception) -> None:
        self.rail.fail(self.mark.ints(), error, self.device)


class FixedCapacity(Planner):
    """Send every token to every host. Each exchange carries its purpose, and the device records differences.

    Invariant: a rank in a forward pass and a rank in a backward pass exchange equally many bytes, until both have an
    error.
    """

    waits = False

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        # Plans: of the last call, with its tokens and stream; and those that CUDA graphs read, which are never freed.
        self._last: tuple[int, int, DispatchPlan] | None = None
        self._captured: dict[int, DispatchPlan] = {}
        self._marks: dict[int, Tensor] = {}  # by flags: an empty row with a mark and a number
        # Marks of the last call in which hosts differed: on the device, and in memory that the host reads.
        self._seen: tuple[Tensor, Tensor] | None = None

    @property
    def _width(self) -> int:
        """Numbers beside a row, in forward ids, weights and scales; marks have a row, too."""
        return max(2 * self.problem.top_k + self.groups, MARK_INTS + 1)

    def begin(self, ids: Tensor) -> DispatchPlan:
        # Capture of a graph begins when all streams are done.
        tokens, on_gpu = ids.shape[0], self.device.type == "cuda"
        captures = on_gpu and torch.cuda.is_current_stream_capturing()
        stream = torch.cuda.current_stream(self.device).cuda_stream if on_gpu else 0
        last, (size, of, plan) = self._captured.get(tokens), self._last or (-1, 0, None)
        if last is None and size == tokens and (captures or of == stream):
            last = plan
        made = last or self._made(tokens)
        if not captures:
            self._last = tokens, stream, made
        elif last is not None:
            self._captured[tokens] = last
        return made

    def _made(self, tokens: int) -> DispatchPlan:
        """Return a new plan for calls with this number of tokens."""
        chunks, chunk, num = self.chunks, self.chunk, self.num_hosts
        slots, hosts = self.numbers.slots, self.numbers.hosts
        part = -(-tokens // chunks)
        slot, token = slots % chunk, slots // chunk * part + slots % chunk
        none = (slot >= part) | (token >= tokens)
        token = token.masked_fill(none, tokens).view(chunks, 1, chunk).expand(-1, num, -1).flatten()
        marked = torch.nn.functional.pad(token, (0, num), value=tokens + 1)
        # row 1 is the first; of a chunk there are as many of each host before the next one's
        of, slot = slots[:tokens] // max(part, 1), slots[:tokens] % max(part, 1)
        places = (1 + of * num * chunk + slot)[:, None] + (hosts.view(-1) - 1) * chunk
        rows = [[chunk] * num for _ in range(chunks)]
        return DispatchPlan(
            token.clamp(max=max(tokens - 1, 0)), places.view(-1), rows, rows, marked
        )

    def pack_metadata(
        self, columns: list[Tensor], plan: DispatchPlan, flags: int, number: Tensor | None = None
    ) -> Tensor | None:
        tokens, more = len(plan.places) // self.num_hosts, self._width
        more -= sum(t.shape[1] for t in columns)
        parts = [t.view(torch.int32) for t in columns]
        if more:  # before them, where forward has ids and weights
            parts.insert(0, torch.zeros(tokens, more, dtype=torch.int32, device=self.device))
        if not self._marks:
            self.reset()
        marks = self._marks[flags]
        if number is not None:
            marks = marks.clone()
            marks[1, MARK_INTS : MARK_INTS + 1] = number
        return torch.cat([torch.cat(parts, 1), marks])[plan.slots]

    def confirm(self, plan: DispatchPlan, flags: int, number: Tensor | None = None) -> DispatchPlan:
        # On a CPU hosts wait anyway, and gloo ends who is sent more than expected.
        if self.device.type == "cpu":
            self.rail.meet(self.mark.ints(flags))
        return plan

    def _exchanged(self, sent: Tensor, plan: DispatchPlan) -> Tensor:
        more = [*plan.send, [1] * self.num_hosts]
        found, marks = self.once(sent, more, more).tensor_split([-self.num_hosts])
        self._look(marks[:, : MARK_INTS + 1])
        return found

    def _look(self, marks: Tensor) -> None:
        """Check what hosts say of a call: on a device in one of the next calls, as here the host would have to wait."""
        if self._seen is None:
            self._check(marks)
            return
        here, seen = self._seen
        here.copy_(torch.where((marks != marks[self.host]).any(), marks, here))
        seen.copy_(here, non_blocking=True)

    def _check(self, marks: Tensor) -> None:
        """Raise RankMismatch unless all hosts say the same. marks: [N, MARK_INTS + 1], the last a call's number."""
        marks, numbers = marks.split([MARK_INTS, 1], 1)
        check_marks(marks.tolist(), self.host, self.rail.label)
        check_numbers(numbers.flatten().tolist(), self.host, self.rail.label)

    def check(self) -> None:
        if self._seen is not None:
            self._check(self._seen[1])

    def check_all(self) -> None:
        if self._seen is not None:
            here, seen = self._seen
            seen.copy_(here)
            self._check(seen)

    def order(self, local: Tensor) -> Tensor | None:
        """What is for an expert of this host first: rows are computed in the order of DynamicCounts, with its bits."""
        held = self.bounds[self.host + 1] - self.bounds[self.host]
        here = ((local >= 0) & (local < held)).any(1)
        return torch.argsort((~here).to(torch.uint8), stable=True)

    def reset(self) -> None:
        for flags in (0, RECORDED, BACKWARD):
            rows = torch.full((2, self._width), -1, dtype=torch.int32, device="cpu")
            mark = torch.tensor([*self.mark.ints(flags), 0], device="cpu")
            rows[1, : len(mark)] = mark
            self._marks[flags] = rows.to(self.device)
            if self.device.type == "cuda":
                seen = rows[1:, : len(mark)].repeat(self.num_hosts, 1)
                self._seen = seen.to(self.device), seen.pin_memory()


# By what a layer's `exchange` is.
EXCHANGES = {"exact": DynamicCounts, "static": FixedCapacity}


def _swap_levels(rows: Tensor, sizes: Sequence[Sequence[int]]) -> Tensor:
    """Rows in pieces of sizes [A][B], by A and then by B -> by B and then by A."""
    if min(len(sizes), len(sizes[0])) == 1:
        return rows
    pieces = rows.split([n for of in sizes for n in of])
    return torch.cat([piece for b in range(len(sizes[0])) for piece in pieces[b :: len(sizes[0])]])
