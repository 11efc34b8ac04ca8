"""Run a backend inside each of several hosts, and send rows between equal ranks of the hosts over torch.distributed.

    home rank                         the equal rank of each host that owns one of the token's experts       home rank
    x, ids, weights ---- rail: once a host ----> x, ids - first expert of the host -> inner -> y ---- rail ---> sum, y

A host's experts are contiguous, so the inner backend drops ids of other hosts as out of range. A call is cut into
chunks, so that one chunk travels while another is computed. The partial results of a token are summed in the order of
the hosts, in fp32: equal inputs give equal bits.

plan.py decides which rows travel, and what the hosts exchange before: exact or static.

If the precision stores x as e4m3, x and dy travel as e4m3 with their scales. The kernel would quantize the bf16 rows to
the same numbers, so nothing is lost. y and dx travel in bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megamoe.backends.call import Backend, Call, Gradients, GradRequest
from megamoe.backends.gathered import Gathered
from megamoe.backends.hosts.plan import EXCHANGES, DispatchPlan
from megamoe.backends.rail import Exchange, Waiter, all_to_all
from megamoe.backends.statistics import Statistics
from megamoe.core.config import Problem
from megamoe.core.errors import ConfigError, MegaMoEError, PeerFault, ProtocolTimeout, RankMismatch
from megamoe.formats.quantization import codec
from megamoe.formats.quantized import QuantizedRows
from megamoe.formats.weights import ExpertWeights
from megamoe.group.group import Group
from megamoe.group.hosts import Hosts
from megamoe.group.links import Links, Part
from megamoe.group.order import BACKWARD, MARK_INTS, RECORDED, WIDTH
from megamoe.launch.layout import ALIGNMENT
from megamoe.launch.passes import dequantize_activations, quantize_activations, sum_rows

# Ranks exchange the counts of all chunks at once, next to the number of a call.
MAX_CHUNKS = WIDTH - MARK_INTS - 1
CHUNK_ROWS = 512  # with a third of them, a launch's products take as long as reading its weights


def chunks_of(problem: Problem, hosts: Hosts, stated: int | None) -> int:
    """Return the number of chunks. With N chunks or more, for N hosts, the window is as large as for one host.

    Each chunk reads all weights and adds to all of their gradients. So an expert has enough rows per chunk on average.
    """
    if stated is not None:
        return stated
    tokens = problem.max_tokens
    chunks = 1 if tokens < 1024 else 2 if tokens < 4096 else max(len(hosts.names), 4)
    rows = problem.ep_size * tokens * problem.top_k // problem.num_experts
    return max(1, min(chunks, rows // CHUNK_ROWS))


def inside(problem: Problem, hosts: Hosts, chunks: int | None) -> Problem:
    """Return the problem inside this rank's host. Raises ConfigError if a host would have no experts.

    The ranks of a host share its experts as all ranks share all: the first ranks hold one more if they do not divide.
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


class HostsBackend(Backend):
    """Run a layer over several hosts. Its methods are collective over the whole group.

    problem: of the whole group. make: creates the inner backend for the problem inside(). chunks: parts of a call;
    None: by chunks_of(). exchange: of EXCHANGES. engine: sends rows along the rail; None: torch.distributed. group:
    all ranks of the layer; None: that of the links.
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
        group: Group | None = None,
    ) -> None:
        hosts = links.hosts
        self.problem, self.links, self.group = problem, links, group or links.group
        self.inside, self.chunks = inside(problem, hosts, chunks), chunks_of(problem, hosts, chunks)
        ranks = range(0, problem.ep_size + 1, hosts.per_host)
        bounds = [problem.expert_begin(rank) for rank in ranks]
        self._codec = codec(problem.formats.x)
        self._groups = 0  # scales of a row that is sent
        if self._codec is not None:
            _, self._groups = problem.formats.x.scale_shape(1, problem.hidden)
        self.mark = links.group.mark(problem)  # counted on all ranks, also where make() fails
        travel = self._groups, self.mark, engine or _along(links.rail)
        self.planner = EXCHANGES[exchange](problem, links.rail, bounds, self.chunks, *travel)
        self.num_hosts, self._first_expert = len(hosts.names), bounds[self.planner.host]
        self.inner = make(self.inside)
        self.plan = getattr(self.inner, "plan", None)
        self._counts: list[Callable[[], Statistics]] = []  # of the chunks of a call
        self._at_rail = True  # not inside the inner backend
        self._prepared = False
        self._row_bytes = problem.hidden * (2 if self._codec is None else 1), 4 * self._groups
        rows = self.num_hosts * self.planner.chunk
        self._sizes = [
            -(-n // ALIGNMENT) * ALIGNMENT
            for n in (rows * sum(self._row_bytes), rows * problem.top_k * 4, self.inner.state_bytes)
        ]
        of_chunks = self.chunks * sum(self._sizes)
        self.state_bytes = ALIGNMENT + of_chunks

    @property
    def needs_close(self) -> bool:  # type: ignore[override]
        """True if the inner backend has something to free together with other ranks."""
        return self.inner.needs_close

    def prepare(self, weights: ExpertWeights) -> None:
        """Prepare the inner backend and connect the rail, which a graph cannot do. The first call is collective."""
        self.planner.device = device = weights.w13.device
        if self._prepared:
            self.inner.prepare(weights)
            return
        group = self.links.group
        group.all_or_none("prepare the kernel", lambda: self.inner.prepare(weights))
        self.links.rail.barrier()
        self.planner.reset()
        _ = self.planner.numbers  # not in a graph, which cannot load a kernel either
        row = torch.zeros(1, self.problem.hidden, dtype=torch.bfloat16, device=device)
        self._given(*self._stored(row))
        sum_rows(row, *torch.zeros(2, 1, dtype=torch.int64, device=device))
        ones = [1] * self.num_hosts
        self.planner.engine(torch.zeros(self.num_hosts, 1, device=device), ones, ones)()
        self._prepared = True

    def forward(self, call: Call, keep: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return y [T, H] bf16 and the state. Collective."""
        state, self.planner.device = None, call.x.device
        with self._guarded():
            if keep:
                device = call.x.device
                state = torch.empty(self.state_bytes, dtype=torch.uint8, device=device)
            y = self._forward(call, state)
        return y if call.out is None else call.out.copy_(y), state

    def backward(self, call: Call, dy: Tensor, state: Tensor, wanted: GradRequest) -> Gradients:
        """Return the gradients. dy is sent like x, and dx returns like y. Collective."""
        with self._guarded():
            return self._backward(call, dy, state, wanted)

    def statistics(self) -> Statistics:
        """Return the routes of all chunks, and the largest number of passes of a chunk."""
        if self.chunks == 1:
            return self.inner.statistics()
        if not self._counts:
            return super().statistics()  # raises MegaMoEError
        counts, passes = zip(*(vars(made()).values() for made in self._counts), strict=True)
        return Statistics(
            torch.stack(counts).sum(0, dtype=torch.int32), torch.stack(passes).amax(0)
        )

    def abort(self, error: Exception) -> None:
        """Report an error to rail and host. With `static`, the others find out while they wait."""
        if self.links.broken is not None:
            return
        self.links.report(error, refuses=True)
        for ends in (self.planner.abort, self.inner.abort):
            with suppress(MegaMoEError):
                ends(error)
        self.links.end_incident(None if self._stops_clean else f"this rank raised {error}")

    def check(self) -> None:
        """Wait for pending work. Raise the fault of a launch or, with `static`, of hosts that differed."""
        try:
            self.inner.check()
        except MegaMoEError as error:
            self._at_rail = False
            raise self._of_the_job(error) from error
        self.planner.check_all()

    def reset(self) -> None:
        """Renew rail and host groups, and reset the inner backend. Collective over the whole group."""
        self.links.renew()
        self._prepared = False
        self.planner.reset()
        self.inner.reset()

    def close(self) -> None:
        """Close the inner backend."""
        self.inner.close()

    # --- faults ---

    @property
    def _stops_clean(self) -> bool:
        """True if a rejected call leaves no work pending: all ranks met before, or meet for chunk 0."""
        return self.planner.waits and isinstance(self.inner, Gathered)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Raise an error that names the rank at fault, on all ranks, and record faults that need a reset()."""
        self.group.met = True  # errors are told here
        self.links.check()
        self.planner.check_capture()
        self._at_rail = True
        try:
            self.planner.check()
            with torch.no_grad():
                yield
        except Exception as caught:
            error = self._of_the_job(caught)
            own = self.links.report(error)
            if self._at_rail:  # the ranks of this host wait inside
                with suppress(MegaMoEError):
                    self.inner.abort(error)
            said = error if own else self.links.verdict(error)
            clean = self._stops_clean and isinstance(said, (RankMismatch, PeerFault))
            self.links.end_incident(None if clean else str(said))
            if said is caught:
                raise
            raise said from caught
        except BaseException as stopped:  # Ctrl-C
            self.links.end_incident(f"{type(stopped).__name__} stopped a call of this rank")
            raise

    def _of_the_job(self, error: Exception) -> Exception:
        """Add the names of ranks in the job to an error of the kernel, which numbers ranks inside its host."""
        if self._at_rail or not isinstance(error, (ProtocolTimeout, PeerFault)):
            return error
        host = self.links.host
        if isinstance(self.inner, Gathered) or host.size == 1:
            return error
        of = f"on this host rank 0 is {host.label(0)}, and so on"
        return type(error)(f"{error} ({of})")

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """Mark that the inner backend runs: an error then comes from this host, not from the rail."""
        self._at_rail = False
        yield
        self._at_rail = True

    # --- both passes ---

    def _forward(self, call: Call, state: Tensor | None) -> Tensor:
        """Exchange rows with the other hosts, run the inner backend by chunk, and sum the results. Fill `state`."""
        flags = RECORDED * (state is not None)
        ids = self._valid(call.computed_ids())
        plan = self.planner.begin(ids)
        x, scale = self._stored(call.x)
        columns = [ids, call.topk_weights, *([] if scale is None else [scale])]
        meta = self.planner.pack_metadata(columns, plan, flags)
        first = self._first(x, plan)
        plan = self.planner.confirm(plan, flags)
        if state is not None:
            self.links.num_recorded += 1
            _number(state).fill_(self.links.num_recorded)
        met = self.planner.exchange(meta, plan, columns)
        sizes = [sum(of) for of in plan.receive]
        # ids as the inner backend counts experts; ids of other hosts are out of its range
        local = (met[0] - self._first_expert).split(sizes)
        floats = [t.contiguous().view(torch.float32).split(sizes) for t in met[1:]]
        self._counts = []

        def compute(i: int, rows: Tensor) -> Tensor:
            given, order, kept = (rows, local[i], *(of[i] for of in floats)), None, None
            places: list[Tensor] = []
            if state is not None:
                *places, kept_ids, kept = self._views(state, i, len(rows))
                kept_ids.copy_(local[i])
                order = self.planner.order(local[i])
            if order is not None:
                given = tuple(t[order] for t in given)
            rows, inner_ids, scores, *beside = given
            for place, t in zip(places, (rows, *beside), strict=False):
                place.copy_(t)
            x = self._given(rows, *beside, wide=state is not None)
            inside = Call(x, inner_ids, scores, call.weights, state=kept)
            with self._inside():
                y, made = self.inner.forward(inside, keep=state is not None)
                if self.chunks > 1:
                    self._counts.append(self.inner.later_statistics())
            if kept is not None and made is not None and made is not kept:
                kept.copy_(made)
            return y if order is None else torch.empty_like(y).index_copy_(0, order, y)

        return self._summed(plan, self._pipelined(plan, x, first, compute))

    def _backward(self, call: Call, dy: Tensor, state: Tensor, wanted: GradRequest) -> Gradients:
        """Do the same with dy. Sum gradients of weights over chunks, and gradients of tokens over hosts."""
        needs, only_weights = wanted.needs, wanted.only_weights
        # Another rank may need gradients that this one does not.
        there = needs._replace(x=not only_weights, topk_weights=not only_weights)
        plan = self.planner.begin(self._valid(call.computed_ids()))
        rows, scale = self._stored(dy)
        columns, number = [] if scale is None else [scale], _number(state)
        meta = self.planner.pack_metadata(columns, plan, BACKWARD, number)
        first = self._first(rows, plan)
        plan = self.planner.confirm(plan, BACKWARD, number)
        met = self.planner.exchange(meta, plan, columns)
        sizes = [sum(of) for of in plan.receive]
        floats = [t.contiguous().view(torch.float32).split(sizes) for t in met]
        sums, made, of_routes = dict(wanted.into), {}, []

        def compute(i: int, rows: Tensor) -> Tensor:
            stashed_rows, kept_scale, local, kept = self._views(state, i, len(rows))
            given: tuple[Tensor, ...] = (local, rows, *(of[i] for of in floats))
            order = self.planner.order(local)
            if order is not None:
                given = tuple(t[order] for t in given)
            local, *moved = given
            # The inner state has the routing weights that are used.
            scores = torch.zeros(local.shape, dtype=torch.float32, device=dy.device)
            inside = Call(self._given(stashed_rows, kept_scale), local, scores, call.weights)
            of_chunk = wanted._replace(needs=there, into=sums)
            with self._inside():
                found = self.inner.backward(inside, self._given(*moved), kept, of_chunk)
            for name, gradient in zip(Gradients._fields[2:], found.of_weights, strict=True):
                if gradient is not None:  # of the first chunk; the others add to it
                    sums[name] = made[name] = gradient
            if only_weights:
                return rows.new_empty(0)
            assert found.x is not None
            assert found.topk_weights is not None
            both: tuple[Tensor, ...] = found.x, found.topk_weights
            if order is not None:
                both = tuple(torch.empty_like(t).index_copy_(0, order, t) for t in both)
            of_routes.append(both[1])
            return both[0]

        back = self._pipelined(plan, rows, first, compute, returns=not only_weights)
        if not only_weights:
            found = self.planner.once(torch.cat(of_routes), plan.receive, plan.send)
            if needs.x:
                made["x"] = self._summed(plan, back)
            if needs.topk_weights:  # for each route, one host has a gradient and the others zero
                padded = torch.nn.functional.pad(found, (0, 0, 1, 0))
                made["topk_weights"] = self._summed(plan, padded)
        return Gradients(**made)

    def _pipelined(
        self,
        plan: DispatchPlan,
        rows: Tensor,
        first: Tensor,
        compute: Callable[[int, Tensor], Tensor],
        returns: bool = True,
    ) -> Tensor:
        """Send the rows of a chunk, compute the received rows, send results back. Return them after an unused row.

        first: rows of chunk 0. A collective waits for the work in its issuing stream. So chunk i + 1 is sent before
        chunk i is computed.
        """
        sent = [sum(of) for of in plan.send]
        tokens = plan.tokens.split(sent)

        def start(i: int) -> Waiter:
            taken = self._taken(rows, tokens[i]) if i else first[: sent[0]]
            return self.planner.engine(taken, plan.send[i], plan.receive[i])

        back = rows.new_empty(1 + sum(sent), self.problem.hidden, dtype=torch.bfloat16)
        pieces = back[1:].split(sent)
        coming, under_way = start(0), []
        for i in range(self.chunks):
            following = start(i + 1) if i + 1 < self.chunks else coming
            result = compute(i, coming())
            if returns:
                under_way.append(
                    self.planner.engine(result, plan.receive[i], plan.send[i], pieces[i])
                )
            coming = following
        for arrived in under_way:
            arrived()
        return back

    # --- which rows ---

    def _valid(self, ids: Tensor) -> Tensor:
        """Convert [T, K] of any integers to int32. Clamping keeps large numbers from becoming valid ids."""
        return ids if ids.dtype == torch.int32 else ids.clamp(-1, self.problem.num_experts).int()

    def _first(self, rows: Tensor, plan: DispatchPlan) -> Tensor:
        """Return the rows of chunk 0. Before Planner.confirm(), other rows may follow."""
        return self._taken(rows, plan.tokens[: sum(plan.send[0])])

    def _taken(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """Return the rows to send. With `static`, zeros if there is no token at all."""
        if not len(rows):
            return rows.new_zeros(len(tokens), rows.shape[1])
        return rows[tokens]

    def _summed(self, plan: DispatchPlan, rows: Tensor) -> Tensor:
        """Sum the results of each token, in the order of hosts."""
        bags = self.planner.numbers.bags[: len(plan.places) // self.num_hosts]
        return sum_rows(rows, plan.places, bags)

    # --- rows as they are sent ---

    def _stored(self, x: Tensor | QuantizedRows) -> tuple[Tensor, Tensor | None]:
        """Return bf16 rows, or e4m3 rows as bytes and their scales, quantized on the home rank."""
        if self._codec is None:
            assert isinstance(x, Tensor)
            return x, None
        q, scale = x if isinstance(x, QuantizedRows) else quantize_activations(x, self._codec)
        return q.view(torch.uint8), scale

    def _given(self, rows: Tensor, scale: Tensor | None = None, *, wide: bool = True) -> Any:
        """Return rows as the inner backend takes them. wide: in bf16, which is quantized to the same e4m3."""
        if self._codec is None or scale is None:
            return rows
        q = rows.view(self.problem.formats.x.dtype)
        return dequantize_activations(q, scale, self._codec) if wide else QuantizedRows(q, scale)

    def _views(self, state: Tensor, i: int, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return a chunk's part of the state: rows and scales as sent, in the order of computation; local ids as
        received; the inner state."""
        hidden, top_k = self.problem.hidden, self.problem.top_k
        begin = ALIGNMENT + i * sum(self._sizes)
        x, ids, inner = state[begin:][: sum(self._sizes)].split(self._sizes)
        x, scale, _ = x.tensor_split([rows * self._row_bytes[0], rows * sum(self._row_bytes)])
        return (
            x.view(torch.bfloat16 if self._codec is None else torch.uint8).view(rows, hidden),
            scale.view(torch.float32).view(rows, self._groups),
            ids[: rows * top_k * 4].view(torch.int32).view(rows, top_k),
            inner[: self.inner.state_bytes],
        )


def _along(rail: Part) -> Exchange:
    """Return the engine of torch.distributed over the rail at the time of a call. On CPUs its waits are bounded."""

    def exchange(rows: Tensor, *how: Any) -> Waiter:
        options: dict[str, Any] = {"own": rail.rank} if rows.is_cuda else {"wait": rail.wait}
        return all_to_all(rail.process_group, **options)(rows, *how)

    return exchange


def _number(state: Tensor) -> Tensor:
    """Return the part of a state with the number of its call, [1] int32."""
    return state[:4].view(torch.int32)
