"""Several hosts: a backend inside each, rows between equal ranks of the hosts over torch.distributed.

    home rank                         the equal rank of each host that owns one of the token's experts       home rank
    x, ids, weights ---- rail: once a host ----> x, ids - first expert of the host -> inner -> y ---- rail ---> sum, y

A host's experts are contiguous, so that others' ids lie outside of its own and the inner backend drops them. A call is
cut into chunks, of which one travels while another is computed. What the hosts make of a token is summed in their
order, in fp32: same inputs, same bits.

exact: rows travel that are needed, by counts, for which the host waits once a pass. static: every token travels to
every host in slots of a fixed number, nothing waits, and a graph can capture it. Both compute the same rows in the
same order.

Where the precision stores x as e4m3, x and dy travel as e4m3 with their scales: numbers that the kernel makes of bf16
rows, so nothing is lost that was not before. y and dx travel in bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from megamoe.backends.call import Backend, Call, Gradients, Wanted
from megamoe.backends.gathered import Gathered
from megamoe.backends.rail import Exchange, Waiter, all_to_all, exchange_counts
from megamoe.backends.statistics import Statistics
from megamoe.core.config import Problem
from megamoe.core.errors import (
    ConfigError,
    MegaMoEError,
    PeerFault,
    ProtocolTimeout,
    RankMismatch,
)
from megamoe.core.table import SCALE_GROUP
from megamoe.formats.quantization import codec
from megamoe.formats.quantized import QuantizedRows
from megamoe.formats.weights import ExpertWeights
from megamoe.group.hosts import Hosts
from megamoe.group.links import Links, Part
from megamoe.group.order import BACKWARD, MARK_INTS, RECORDED, REFUSED, check_marks
from megamoe.launch.launches import refuse_capture
from megamoe.launch.layout import ALIGNMENT

EXCHANGES = ("exact", "static")


def chunks_of(problem: Problem, hosts: Hosts, stated: int | None) -> int:
    """Return the number of chunks. With N or more, as large calls have, the window is as large as for one host."""
    if stated is not None:
        return stated
    tokens = problem.max_tokens
    return 1 if tokens < 1024 else 2 if tokens < 4096 else max(len(hosts.names), 4)


def inside(problem: Problem, hosts: Hosts, chunks: int | None) -> Problem:
    """Return the problem inside this rank's host. Raises ConfigError where a host would have no experts.

    The ranks of a host share its experts as all ranks share all: the first ones hold one more where they do not divide.
    """
    num, each = len(hosts.names), hosts.per_host
    host, local = hosts.place(problem.rank)
    begin, end = (problem.expert_begin(h * each) for h in (host, host + 1))
    if problem.num_experts <= (num - 1) * each:
        expected = f"more than {(num - 1) * each}, so that each of {num} hosts has experts"
        raise ConfigError("num_experts", problem.num_experts, expected)
    chunk = -(-problem.max_tokens // chunks_of(problem, hosts, chunks))
    return replace(
        problem, num_experts=end - begin, ep_size=each, rank=local, max_tokens=num * chunk
    )


class _Trip(NamedTuple):
    """Which rows of a call go where, by chunk. part: own tokens of a chunk, but for the last ones.

    tokens: indices of what is sent, by host. send, receive: how many rows to and from each host.
    """

    part: int
    tokens: list[Tensor]
    send: list[list[int]]
    receive: list[list[int]]


class HostsBackend(Backend):
    """Collective over the whole group. Inside a host, what the inner backend says of its own group.

    problem: of the whole group. make: makes the inner backend of the problem inside(). chunks: parts of a call, None:
    by max_tokens. exchange: of EXCHANGES. engine: what carries rows along the rail; None: torch.distributed.
    """

    def __init__(
        self,
        problem: Problem,
        links: Links,
        make: Callable[[Problem], Backend],
        *,
        chunks: int | None = None,
        exchange: str = "exact",
        engine: Exchange | None = None,
    ) -> None:
        hosts = links.hosts
        self.problem, self.links, self.exact = problem, links, exchange == "exact"
        self.num_hosts, (self.host, _) = len(hosts.names), hosts.place(problem.rank)
        self.chunks = chunks_of(problem, hosts, chunks)
        self.chunk = -(-problem.max_tokens // self.chunks)  # most tokens of a rank in one
        self.inside = inside(problem, hosts, chunks)
        ranks = range(0, problem.ep_size + 1, hosts.per_host)
        self._bounds = [problem.expert_begin(rank) for rank in ranks]
        self._codec = codec(problem.formats.x)
        self._exchange = engine or _along(links.rail)
        self.mark = links.group.mark(problem)  # counted on all ranks, also where make() fails
        self.inner = make(self.inside)
        self.plan = getattr(self.inner, "plan", None)
        self._device = torch.device("cpu")
        self._counts: list[Callable[[], Statistics]] = []  # of the chunks of a call
        self._at_rail = True  # not inside the inner backend
        self._marks: dict[int, Tensor] = {}  # static: rows that carry a mark, by flags
        self._seen: Tensor | None = None  # where a device puts those of a call
        rows = self.num_hosts * self.chunk
        self._sizes = [
            -(-n // ALIGNMENT) * ALIGNMENT
            for n in (rows * self._row_bytes, rows * problem.top_k * 4, self.inner.state_bytes)
        ]
        self.state_bytes = self.chunks * sum(self._sizes) if self.inner.state_bytes else 0

    @property
    def _row_bytes(self) -> int:
        hidden = self.problem.hidden
        return 2 * hidden if self._codec is None else hidden + 4 * -(-hidden // SCALE_GROUP)

    @property
    def needs_close(self) -> bool:  # type: ignore[override]
        """Whether the inner backend has something to free together with other ranks."""
        return self.inner.needs_close

    def prepare(self, weights: ExpertWeights) -> None:
        """As the inner backend; also connect the rail, which a graph cannot do. Collective, and so are its errors."""
        self._device = weights.w13.device
        group = self.links.group
        group.all_or_none("prepare the kernel", lambda: self.inner.prepare(weights))
        self.links.rail.barrier()
        self._make_marks()
        ones = [1] * self.num_hosts
        self._exchange(torch.zeros(self.num_hosts, 1, device=self._device), ones, ones)()

    def forward(self, call: Call, keep: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return y [T, H] bf16 and the state. Collective."""
        state, self._device = None, call.x.device
        with self._guarded():
            if keep:
                device = call.x.device
                state = torch.empty(self.state_bytes, dtype=torch.uint8, device=device)
            y = self._forward(call, state)
        return y if call.out is None else call.out.copy_(y), state

    def backward(self, call: Call, dy: Tensor, state: Tensor, wanted: Wanted) -> Gradients:
        """Return the gradients: dy goes where x went, dx comes back where y came back. Collective."""
        with self._guarded():
            return self._backward(call, dy, state, wanted)

    def statistics(self) -> Statistics:
        """Return routes of all chunks, and the most passes that one of them took."""
        if self.chunks == 1:
            return self.inner.statistics()
        if not self._counts:
            return Statistics.of_last(None)
        counts, passes = zip(*(vars(made()).values() for made in self._counts), strict=True)
        return Statistics(
            torch.stack(counts).sum(0, dtype=torch.int32), torch.stack(passes).amax(0)
        )

    def refuse(self) -> None:
        """Tell rail and host that this rank makes no call. static: the others find out while they wait."""
        if self.links.broken is not None:
            return
        self.links.refuse()
        with suppress(MegaMoEError):
            if self.exact:
                nothing = torch.empty(0, dtype=torch.int64, device=self._device)
                self.links.rail.meet(self.mark.ints(REFUSED), [nothing] * self.num_hosts)
        with suppress(MegaMoEError):
            self.inner.refuse()
        self.links.end_incident(None if self._stops_clean else "this rank refused its arguments")

    def check(self) -> None:
        """Wait for what is pending; raise the fault of a launch, if there is one."""
        try:
            self.inner.check()
        except MegaMoEError as error:
            self._at_rail = False
            raise self._of_the_job(error) from error

    def reset(self) -> None:
        """Make rail and host anew, and what the inner backend has. Collective over the whole group."""
        self.links.renew()
        self._make_marks()
        self.inner.reset()

    def close(self) -> None:
        """Free what the inner backend shares."""
        self.inner.close()

    # --- faults ---

    @property
    def _stops_clean(self) -> bool:
        """Whether a call that ranks refuse leaves nothing under way: all of them met before, or meet for chunk 0."""
        return self.exact and isinstance(self.inner, Gathered)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Raise an error that names who broke the call, on all ranks, and remember what only reset() mends."""
        self.links.check()
        if self.exact and self._device.type == "cuda":  # before ranks meet: all capture
            refuse_capture('a graph cannot capture exchange="exact": make the layer with "static"')
        self._at_rail = True
        try:
            if self._seen is not None:
                check_marks(self._seen.tolist(), self.host, self.links.rail.label)
            with torch.no_grad():
                yield
        except Exception as caught:
            error = self._of_the_job(caught)
            own = self.links.report(error)
            if self._at_rail:  # the ranks of this host wait inside
                with suppress(MegaMoEError):
                    self.inner.refuse()
            said = error if own else self.links.verdict(error)
            clean = self._stops_clean and isinstance(said, RankMismatch)
            self.links.end_incident(None if clean else str(said))
            if said is caught:
                raise
            raise said from caught

    def _of_the_job(self, error: Exception) -> Exception:
        """Return an error of the kernel, which knows the ranks of its host, with what they are called outside."""
        if self._at_rail or not isinstance(error, (ProtocolTimeout, PeerFault)):
            return error
        host = self.links.host
        if isinstance(self.inner, Gathered) or host.size == 1:
            return error
        of = f"on this host rank 0 is {host.label(0)}, and so on"
        return type(error)(f"{error} ({of})")

    @contextmanager
    def _inside(self) -> Iterator[None]:
        self._at_rail = False
        yield
        self._at_rail = True

    # --- both passes ---

    def _forward(self, call: Call, state: Tensor | None) -> Tensor:
        top_k, tokens = self.problem.top_k, call.x.shape[0]
        ids = self._valid(call.computed_ids())
        trip = self._trip(ids, RECORDED * (state is not None))
        # ids and weights of all chunks in one exchange, [rows, 2K] of 4 bytes
        meta = torch.cat([ids, call.topk_weights.view(torch.int32)], 1)
        met = self._exchange_meta(meta, trip, RECORDED * (state is not None))
        packed = self._packed(call.x)
        self._counts = []

        def compute(i: int, rows: Tensor) -> Tensor:
            local = self._local(met[i][:, :top_k])
            scores = met[i][:, top_k:].contiguous().view(torch.float32)
            order, kept = self._order(local), None
            if state is not None:
                kept_rows, kept_ids, kept = self._views(state, i, len(rows))
                kept_ids.copy_(local)
            if order is not None:
                rows, local, scores = rows[order], local[order], scores[order]
            if state is not None:
                kept_rows.copy_(_bytes(rows))
            x = self._unpacked(rows) if state is None else self._wide(rows)
            given = Call(x, local, scores, call.weights, state=kept)
            with self._inside():
                y, made = self.inner.forward(given, keep=state is not None)
                if self.chunks > 1:
                    self._counts.append(self.inner.later_statistics())
            if kept is not None and made is not None and made is not kept:
                kept.copy_(made)
            return y if order is None else torch.empty_like(y).index_copy_(0, order, y)

        back = self._pipelined(trip, packed, compute)
        return self._summed(trip, back, tokens).to(torch.bfloat16)

    def _backward(self, call: Call, dy: Tensor, state: Tensor, wanted: Wanted) -> Gradients:
        needs, only_weights = wanted.needs, wanted.only_weights
        # Another rank may want what this one does not.
        there = needs._replace(x=not only_weights, topk_weights=not only_weights)
        trip = self._trip(self._valid(call.computed_ids()), BACKWARD)
        packed, hidden = self._packed(dy), self.problem.hidden
        sums, made = dict(wanted.into), {}

        def compute(i: int, rows: Tensor) -> Tensor:
            kept_rows, local, kept = self._views(state, i, len(rows))
            order = self._order(local)
            if order is not None:
                rows, local = rows[order], local[order]
            # The state has the weights that count.
            scores = torch.zeros(local.shape, dtype=torch.float32, device=dy.device)
            x = self._wide(kept_rows)
            given = Call(x, local, scores, call.weights)
            of_chunk = wanted._replace(needs=there, into=sums)
            with self._inside():
                found = self.inner.backward(given, self._wide(rows), kept, of_chunk)
            for name, gradient in zip(Gradients._fields[2:], found.of_weights, strict=True):
                if gradient is not None:  # of the first chunk; the others add to it
                    sums[name] = made[name] = gradient
            if only_weights:
                return rows.new_empty(0)
            assert found.x is not None
            assert found.topk_weights is not None
            both = torch.cat([_bytes(found.x), _bytes(found.topk_weights)], 1)
            return both if order is None else torch.empty_like(both).index_copy_(0, order, both)

        back = self._pipelined(trip, packed, compute, returns=not only_weights)
        if not only_weights:
            parts = [rows[:, : 2 * hidden].contiguous().view(torch.bfloat16) for rows in back]
            dx = self._summed(trip, parts, len(dy)).to(torch.bfloat16)
            # of each route all hosts' but one are zero
            parts = [rows[:, 2 * hidden :].contiguous().view(torch.float32) for rows in back]
            d_weights = self._summed(trip, parts, len(dy))
            made |= {"x": dx} if needs.x else {}
            made |= {"topk_weights": d_weights} if needs.topk_weights else {}
        return Gradients(**made)

    def _pipelined(
        self,
        trip: _Trip,
        packed: Tensor,
        compute: Callable[[int, Tensor], Tensor],
        returns: bool = True,
    ) -> list[Tensor]:
        """Send the rows of a chunk, compute what comes, send that back. Return what came back, by chunk.

        A collective waits for what its issuing stream holds: so chunk i + 1 goes out before chunk i is computed.
        """

        def start(i: int) -> Waiter:
            return self._exchange(self._taken(packed, trip, i), trip.send[i], trip.receive[i])

        coming, back = start(0), []
        for i in range(self.chunks):
            following = start(i + 1) if i + 1 < self.chunks else coming
            result = compute(i, coming())
            if returns:
                back.append(self._exchange(result, trip.receive[i], trip.send[i]))
            coming = following
        return [arrived() for arrived in back]

    # --- which rows ---

    def _valid(self, ids: Tensor) -> Tensor:
        """[T, K] of any integers -> int32, those of no expert as -1: another number could be one's in 32 bits."""
        return ids.where((ids >= 0) & (ids < self.problem.num_experts), -1).to(torch.int32)

    def _local(self, ids: Tensor) -> Tensor:
        """Return ids as the inner backend counts experts; those of others lie outside of its own."""
        return (ids - self._bounds[self.host]).contiguous()

    def _order(self, local: Tensor) -> Tensor | None:
        """static: what is for an expert of this host first, so that rows are computed in the order of exact."""
        if self.exact:
            return None
        here = ((local >= 0) & (local < self.inside.num_experts)).any(1)
        return torch.argsort((~here).to(torch.uint8), stable=True)

    def _trip(self, ids: Tensor, flags: int) -> _Trip:
        """ids: [T, K], valid. exact: meet along the rail, and tell how many rows will come."""
        tokens, device = ids.shape[0], ids.device
        part = -(-tokens // self.chunks)
        if not self.exact:
            slot = torch.arange(self.chunk, device=device)
            mine = [slot.clamp(max=max(part - 1, 0)) + i * part for i in range(self.chunks)]
            every = [t.clamp(max=max(tokens - 1, 0)).repeat(self.num_hosts) for t in mine]
            rows = [[self.chunk] * self.num_hosts] * self.chunks
            return _Trip(part, every, rows, rows)
        pairs = zip(self._bounds, self._bounds[1:], strict=False)
        owned = torch.stack([((ids >= b) & (ids < e)).any(1) for b, e in pairs])  # [N, T]
        padded = torch.nn.functional.pad(owned, (0, part * self.chunks - tokens))
        by_chunk = padded.view(self.num_hosts, self.chunks, part)
        counts = by_chunk.sum(2)  # [N, C]
        own = torch.empty(counts.shape, dtype=counts.dtype, device="cpu", pin_memory=counts.is_cuda)
        own.copy_(counts, non_blocking=True)  # there when the others' are
        _, found = exchange_counts(self.links.rail, self.mark.ints(flags), list(counts))
        # Sorting keeps their order and, unlike nonzero(), no host waits for it.
        order = torch.argsort((~by_chunk).to(torch.uint8), dim=2, stable=True)
        send, receive = own.T.tolist(), found.T.tolist()
        taken = [
            torch.cat([order[h, i, :n] for h, n in enumerate(send[i])]) + i * part
            for i in range(self.chunks)
        ]
        return _Trip(part, taken, send, receive)

    def _exchange_meta(self, meta: Tensor, trip: _Trip, flags: int) -> list[Tensor]:
        """Exchange ids and weights of all chunks at once. Return what comes, by chunk. static: marks go with them."""
        of = [self._taken(meta, trip, i) for i in range(self.chunks)]
        send, receive = ([*map(list, counts)] for counts in (trip.send, trip.receive))
        if not self.exact:
            for i, rows in enumerate(of):
                empty = max(0, min(trip.part, len(meta) - i * trip.part))
                rows.view(self.num_hosts, self.chunk, -1)[:, empty:] = -1
            if not self._marks:
                self._make_marks()
            of.append(self._marks[flags])
            send.append([1] * self.num_hosts)
            receive.append([1] * self.num_hosts)
        by_host = [rows.split(n) for rows, n in zip(of, send, strict=True)]
        sent = torch.cat([pieces[h] for h in range(self.num_hosts) for pieces in by_host])
        totals = ([sum(column) for column in zip(*n, strict=True)] for n in (send, receive))
        found = self._exchange(sent, *totals)()
        pieces = found.split([n[h] for h in range(self.num_hosts) for n in receive])
        met = [torch.cat(pieces[i :: len(of)]) for i in range(len(of))]
        if not self.exact:
            self._look_at(met.pop()[:, :MARK_INTS])
        return met

    def _make_marks(self) -> None:
        """static: make rows for each host that say which call this is, and a place for those that come."""
        for flags in (0, RECORDED) if not self.exact else ():
            row = torch.zeros(2 * self.problem.top_k, dtype=torch.int32, device="cpu")
            row[:MARK_INTS] = torch.tensor(self.mark.ints(flags), device="cpu")
            rows = row.repeat(self.num_hosts, 1)
            if self._device.type == "cuda":
                self._seen = rows[:, :MARK_INTS].contiguous().pin_memory()
            self._marks[flags] = rows.to(self._device)

    def _look_at(self, marks: Tensor) -> None:
        """Compare marks [N, MARK_INTS] of a call: now, or in the next one where the host would have to wait."""
        if self._seen is None:
            check_marks(marks.tolist(), self.host, self.links.rail.label)
        else:
            self._seen.copy_(marks, non_blocking=True)

    def _taken(self, rows: Tensor, trip: _Trip, i: int) -> Tensor:
        """Return the rows of a chunk that travel. static: slots without a token hold any row, or zeros."""
        if not len(rows) and not self.exact:
            return rows.new_zeros(len(trip.tokens[i]), rows.shape[1])
        return rows[trip.tokens[i]]

    def _summed(self, trip: _Trip, rows: Sequence[Tensor], tokens: int) -> Tensor:
        """Sum what came back of each token in the order of hosts -> [T, n] fp32. No host twice, so no atomics."""
        total = rows[0].new_zeros(tokens, rows[0].shape[1], dtype=torch.float32)
        for i, of_chunk in enumerate(rows):
            pieces = of_chunk.split(trip.send[i])
            if not self.exact:
                own = total[i * trip.part : (i + 1) * trip.part]
                for piece in pieces:
                    own += piece[: len(own)]
                continue
            for token, piece in zip(trip.tokens[i].split(trip.send[i]), pieces, strict=True):
                total[token] += piece
        return total

    # --- rows as they travel ---

    def _packed(self, x: Tensor | QuantizedRows) -> Tensor:
        """Return bf16 rows, or bytes of e4m3 rows with their scales side by side, quantized at home."""
        if self._codec is None:
            assert isinstance(x, Tensor)
            return x
        q, scale = x if isinstance(x, QuantizedRows) else self._codec.quantize(x)
        return torch.cat([_bytes(q), _bytes(scale)], 1)

    def _wide(self, rows: Tensor) -> Tensor:
        """Return rows in bf16, which makes the same e4m3 again."""
        x = self._unpacked(rows)
        if not isinstance(x, QuantizedRows):
            return x
        assert self._codec is not None
        return self._codec.dequantize(*x).to(torch.bfloat16)

    def _unpacked(self, rows: Tensor) -> Tensor | QuantizedRows:
        """Return rows as the inner backend takes them."""
        if self._codec is None:
            return rows.view(torch.bfloat16)
        hidden = self.problem.hidden
        q = rows[:, :hidden].contiguous().view(self.problem.formats.x.dtype)
        scale = rows[:, hidden:].contiguous().view(torch.float32)
        return QuantizedRows(q, scale)

    def _views(self, state: Tensor, i: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return what the state has of a chunk: rows as they travelled, in the order in which they are computed; local
        ids as they came; the inner state."""
        begin, parts = i * sum(self._sizes), []
        for size in self._sizes:
            parts.append(state[begin : begin + size])
            begin += size
        x, ids, inner = parts
        top_k = self.problem.top_k
        x = x[: rows * self._row_bytes].view(rows, self._row_bytes)
        ids = ids[: rows * top_k * 4].view(torch.int32).view(rows, top_k)
        return x, ids, inner[: self.inner.state_bytes]


def _along(rail: Part) -> Exchange:
    """Return the engine of torch.distributed; on the CPU its waits are bounded."""

    def exchange(rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> Waiter:
        wait = None if rows.is_cuda else rail.wait
        return all_to_all(rail.process_group, wait)(rows, send, receive)

    return exchange


def _bytes(rows: Tensor) -> Tensor:
    """[M, n] -> [M, bytes] uint8."""
    return rows.contiguous().view(torch.uint8)
