"""A fabric that is not there: an engine that spins for as long as bytes would take, and hosts that mirror this one.

So overlap and cost of the backend over hosts can be measured on one GPU. All hosts have the experts of this one, and
tokens like its own, whose ids are turned by as many hosts: then host h sends to this one what this one sends to it, but
that ids count from the experts of h. So every exchange has the right rows, and y is that of a layer.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from statistics import median
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from bench.hosts.model import Fabric, Given, Prediction, interpolated, predict
from bench.ranks import Rank
from bench.shapes import problem_of, shapes_from
from bench.tables import header, write_table
from bench.timing import Contender, Timer
from megamoe.backends.call import Backend, Call
from megamoe.backends.hosts.backend import HostsBackend, chunks_of
from megamoe.backends.rail import Waiter
from megamoe.backends.select import make_backend
from megamoe.core.config import Problem
from megamoe.group.group import Group
from megamoe.group.hosts import Hosts
from megamoe.group.links import RAIL_CTAS
from megamoe.testing import make_inputs, make_weights
from megamoe.testing.shapes import Shape

SAMPLES = 20


class Spinning:
    """The engine (megamoe/backends/rail.py, Exchange) of a wire with one direction at a time, of host 0.

    us_of: bytes that leave this host -> us. The time that an exchange waits for its rows is not the wire's.
    problem: of all hosts. exchange: of the backend.
    """

    def __init__(
        self,
        us_of: Callable[[float], float],
        device: torch.device,
        problem: Problem,
        exchange: str = "exact",
    ) -> None:
        self.us_of, self.device, self.problem = us_of, device, problem
        self.marks = int(exchange == "static")  # rows behind those of each host that are no tokens
        self.busy_us, self.num_bytes = 0.0, 0
        self._free = 0.0  # when the wire is, on a CPU
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(
        self,
        rows: Tensor,
        send: Sequence[int],
        receive: Sequence[int],
        place: Tensor | None = None,
    ) -> Waiter:
        assert list(send) == list(receive)  # a mirror
        row = rows[:1].nbytes
        num_bytes = row * max(sum(send[1:]), sum(receive[1:]))
        us = self.us_of(num_bytes)
        self.busy_us, self.num_bytes = self.busy_us + us, self.num_bytes + num_bytes
        if self._stream is None:
            self._free = until = max(self._free, time.perf_counter()) + us / 1e6
            out = self._mirrored(rows, send, place)

            def arrived() -> Tensor:
                time.sleep(max(0.0, until - time.perf_counter()))
                return out

            return arrived
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(int(us * _cycles_per_us(self.device)))
            out = self._mirrored(rows, send, place)
            event = self._stream.record_event()
        rows.record_stream(self._stream)

        def after() -> Tensor:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(event)
            out.record_stream(stream)
            return out

        return after

    def _mirrored(self, rows: Tensor, sizes: Sequence[int], place: Tensor | None) -> Tensor:
        out = torch.empty_like(rows) if place is None else place
        out.copy_(rows)
        if rows.dtype == torch.int32:  # ids come first
            for host, piece in enumerate(out.split(list(sizes))):
                tokens = piece[: len(piece) - self.marks, : self.problem.top_k]
                tokens -= self.problem.expert_begin(host)
        return out


@cache
def _cycles_per_us(device: torch.device) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    cycles = 20_000_000
    for _ in range(2):
        begin.record()
        torch.cuda._sleep(cycles)
        end.record()
        torch.cuda.synchronize(device)
    return float(cycles / (begin.elapsed_time(end) * 1e3))


class _Rail(Group):
    """Ranks of which each says what this one says to it, as a group does that exchanges nothing."""

    def __init__(self, hosts: int) -> None:
        super().__init__()
        self.size = hosts


class StandIn:
    """In place of Links, for one rank of host 0 of hosts that have one."""

    broken = None
    num_recorded = 0

    def __init__(self, hosts: int) -> None:
        self.hosts = Hosts(tuple(f"host {i}" for i in range(hosts)), 1)
        self.group, self.rail = Group(), _Rail(hosts)

    def check(self) -> None:
        """Nothing breaks."""

    def report(self, error: Exception) -> bool:
        """All errors are this rank's own."""
        return True

    def end_incident(self, cause: str | None) -> None:
        """Nobody else is to know."""


def over_hosts(
    problem: Problem, hosts: int, name: str, device: torch.device, engine: Any, **options: Any
) -> HostsBackend:
    """Return a backend over hosts of one rank, of which this process is the first. problem: of all of them."""
    links: Any = StandIn(hosts)
    over = {n: options.pop(n) for n in ("chunks", "exchange") if options.get(n) is not None}

    def make(inside: Problem) -> Backend:
        return make_backend(name, inside, "alone", device=device, **options)

    return HostsBackend(problem, links, make, engine=engine, **over)


def measure(
    shape: Shape,
    precision: str,
    tokens: int,
    hosts: int,
    fabric: Fabric,
    exchange: str,
    args: argparse.Namespace,
) -> tuple[dict[str, float], Prediction]:
    """Return us of the layer, of its launches alone and its wire alone, and what the model says of these launches.

    host: until forward() returns. replay: of a graph of static, on a GPU.
    """
    on_gpu = torch.cuda.is_available() and not args.cpu
    if not on_gpu:
        torch.set_num_threads(1)
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    experts = shape.num_experts // fabric.per_host
    first = Rank(0, hosts, device)
    problem = problem_of(replace(shape, num_experts=experts), tokens, first, precision)
    reserve = RAIL_CTAS if args.reserve_sms is None else args.reserve_sms
    options = {"chunks": args.chunks, "exchange": exchange}
    options |= {"reserve_sms": reserve} if on_gpu else {}
    name = "mega" if on_gpu else "reference"
    found: dict[str, float] = {}
    drawn = make_inputs(problem, tokens, device=device, ids_dtype=torch.int32)
    weights = make_weights(problem, device=device)
    timer = Timer(device, SAMPLES if on_gpu else 3)
    with torch.no_grad():
        engines = {
            "layer": Spinning(fabric.wire_us, device, problem, exchange),
            "without_a_wire": Spinning(lambda _: 0.0, device, problem, exchange),
        }
        for what, engine in engines.items():
            backend = over_hosts(problem, hosts, name, device, engine, **options)
            backend.prepare(weights)
            call = Call(drawn.x, drawn.topk_ids, drawn.topk_weights, weights)
            backend.forward(call)
            engine.busy_us = 0.0
            backend.forward(call)
            found["wire"] = max(found.get("wire", 0.0), engine.busy_us)
            found[what] = _median(timer, what, partial(_forward, backend, call))
            if what == "layer":
                found |= _launches(backend, call, timer)
                queue = partial(backend.forward, call)  # on an idle device, one call at a time
                found["host"] = median(timer.host(queue, calls=1, repeats=SAMPLES, warm_up=0))
                if exchange == "static" and on_gpu:
                    found["replay"] = _replayed(backend, call, timer)
            backend.close()
    chunks = chunks_of(problem, StandIn(hosts).hosts, args.chunks)
    of_chunk = [(max(1, tokens // chunks), found["launches"] / chunks * fabric.sms_left)]
    given = Given(interpolated(of_chunk), chunks=(chunks,))
    waits = fabric if exchange == "exact" else replace(fabric, host_us=0.0)
    return found, predict(shape, precision, tokens, hosts, waits, given)


def _forward(backend: Backend, call: Call, _: Any) -> Any:
    return backend.forward(call)


def _replayed(backend: Backend, call: Call, timer: Timer) -> float:
    """Return us of a graph's replay."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.forward(call)
    us = _median(timer, "replay", lambda _: graph.replay())
    backend.check()
    return us


def _launches(backend: HostsBackend, call: Call, timer: Timer) -> dict[str, float]:
    """Return us of the inner launches that a call makes, one behind the other, and of one of them."""
    calls: list[Call] = []
    good = backend.inner.forward

    def keep(given: Call, keep: bool = False) -> Any:
        calls.append(given)
        return good(given, keep)

    with mock.patch.object(backend.inner, "forward", keep):
        backend.forward(call)
    us = _median(timer, "launches", lambda _: [good(c) for c in calls])
    return {"launches": us, "one_launch": us / len(calls)}


def _median(timer: Timer, name: str, timed: Callable[[Any], Any]) -> float:
    return timer.medians([Contender(name, timed)])[0]


@dataclass(frozen=True)
class Spun:
    """A line of the table: us of a forward pass, and of its parts."""

    shape: str
    precision: str
    tokens: int
    hosts: int
    chunks: int
    exchange: str
    wire: float
    layer: float
    launches: float
    one_launch: float
    host: float
    replay: float | None
    without_a_wire: float
    model: float

    @property
    def most(self) -> float:
        """Return what is allowed: what takes longer, wire or launches, with one chunk's part of both, and 10 %."""
        chunk = self.one_launch + self.wire / self.chunks
        return 1.1 * (max(self.wire, self.launches) + chunk)

    @property
    def missed(self) -> bool:
        """Return whether a replay, or where there is none a call, takes longer."""
        return (self.replay or self.layer) > self.most


def run(args: argparse.Namespace) -> int:
    """Measure all that is asked for; print a line each; write --out. Returns 1 where one has MISSED."""
    fabric = Fabric(args.per_host, args.gb_s, args.latency_us, args.hbm_gb_s, args.host_us)
    print(title := header())
    print(f"# {fabric}; an engine that spins; one rank's experts; us of a forward pass")
    table = []
    for shape, precision in product(shapes_from(args), args.precision):
        for hosts, tokens, exchange in product(args.hosts, args.tokens, args.exchange):
            found, model = measure(shape, precision, tokens, hosts, fabric, exchange, args)
            of = shape.name, precision, tokens, hosts, model.chunks, exchange
            figures: dict[str, Any] = {"replay": None, **found, "model": model.two_level}
            line = Spun(*of, **figures)
            table.append(line)
            said = "  ".join(f"{name.replace('_', ' ')} {us:.0f}" for name, us in found.items())
            print(
                f"{shape.name:14}{precision:12}{tokens:6} tokens {hosts} hosts {model.chunks} chunks {exchange}  "
                f"{said}  model {line.model:.0f}  at most {line.most:.0f}"
                + ("  MISSED" if line.missed else ""),
                flush=True,
            )
    if args.out is not None:
        write_table(args.out, title, table)
    return int(any(line.missed for line in table))
