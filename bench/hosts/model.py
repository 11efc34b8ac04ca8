"""What a layer over N hosts takes: a model of the wire around the time of launches inside a host.

A rank's wire carries d rows of each token out and back, d the other hosts that own one of its experts. It is one wire
for both ways, as one communication stream is. Chunks go D0 D1 C0 D2 C1 ...; launches follow each other. Around that is
the glue: exact's wait for the host, small kernels, quantization before the first row leaves, a gathering of rows for
each chunk beside its launch, and behind the last row one sum over hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import comb, sqrt
from typing import NamedTuple

import torch

from bench.floors import GEMM_TFLOPS
from bench.ranks import Rank
from bench.shapes import problem_of
from megamoe.backends.hosts.backend import chunks_of, inside
from megamoe.core.table import PRECISIONS
from megamoe.group.hosts import Hosts
from megamoe.launch.arguments import Plan
from megamoe.launch.layout import default_pool_rows
from megamoe.testing.shapes import Shape

CHUNKS = (1, 2, 4, 8)
LEAST_TOKENS = 32  # of a chunk
SMALL_US = 80.0  # some 15 kernels that have next to nothing to do: a graph's replay beside this model, H200, 2026-11-26


@dataclass(frozen=True)
class Fabric:
    """Hosts of GPUs with a link each. gb_s, latency_us: of an exchange, a rank and direction.

    46 GB/s and 30 us are what NCCL was said to reach between two hosts of 8 H100 with 400 Gb/s (DeepEP, issue 3).
    host_us: by which `exact` takes longer than `static` in a graph: what the host does behind its wait for counts. 310
    to 670 in --spin on an H200, 2026-11-26; less on a faster host.
    """

    per_host: int = 8
    gb_s: float = 46.0
    latency_us: float = 30.0
    hbm_gb_s: float = 3000.0
    host_us: float = 365.0
    sms_left: float = 124 / 132

    def wire_us(self, num_bytes: float) -> float:
        """Return the time of one exchange."""
        return self.latency_us + num_bytes / self.gb_s / 1e3


def other_hosts(shape: Shape, hosts: int, groups: tuple[int, int] | None = None) -> float:
    """Return d under uniform routing. groups: (of, taken), DeepSeek's limit of the groups that a token may choose."""
    if groups is None:
        others = shape.num_experts - shape.num_experts // hosts
        return (hosts - 1) * (1 - comb(others, shape.top_k) / comb(shape.num_experts, shape.top_k))
    of, taken = groups
    return (hosts - 1) * (1 - comb(of - of // hosts, taken) / comb(of, taken))


def row_bytes(shape: Shape, precision: str) -> tuple[int, int]:
    """Return the bytes of a row with its ids and weights on its way out, and of one on its way back."""
    scaled = PRECISIONS[precision].x.scaled
    x = shape.hidden + 4 * -(-shape.hidden // 128) if scaled else 2 * shape.hidden
    return x + 8 * shape.top_k, 2 * shape.hidden


def glue_us(shape: Shape, precision: str, tokens: int, others: float, fabric: Fabric) -> float:
    """Return the time of what nothing hides: small kernels, quantization, and the sum over hosts."""
    x, y = row_bytes(shape, precision)
    quantized = 2 * shape.hidden + x if PRECISIONS[precision].x.scaled else 0
    return SMALL_US + tokens * (quantized + (others + 2) * y) / fabric.hbm_gb_s / 1e3


def launch_us(shape: Shape, precision: str, tokens: float, hosts: int, fabric: Fabric) -> float:
    """Return the time of a launch inside a host, of as many tokens of each rank: 1.28 sqrt(weights^2 + FLOPs^2) + 30.

    Fitted to the sweep of EP4 on H200: DeepSeek-V3 within 9 %, Qwen3-235B 20 % too low at 512 and 1024.
    """
    ranks = hosts * fabric.per_host
    hit = 1 - (1 - shape.top_k / shape.num_experts) ** (tokens * ranks)
    w = PRECISIONS[precision].w
    size = shape.matrices * shape.hidden * shape.intermediate * w.bytes / w.packed  # no scales
    weights_us = shape.num_experts / ranks * hit * size / fabric.hbm_gb_s / 1e3
    flops_us = shape.flops(1) * tokens / (GEMM_TFLOPS[precision] * 1e6)
    return 1.28 * sqrt(weights_us**2 + flops_us**2) + 30


def pipeline_us(chunks: int, out: float, launch: float, back: float) -> float:
    """Return when the last row is back. out, launch, back: times of one chunk."""
    free, ready = out, [out]
    done: list[float] = []
    for i in range(chunks):
        if i + 1 < chunks:
            free += out
            ready.append(free)
        done.append(max(done[-1] if done else 0.0, ready[i]) + launch)
        if i:
            free = max(free, done[i - 1]) + back
    return max(free, done[-1]) + back


@dataclass(frozen=True)
class Prediction:
    """Of one layer's forward pass on each rank; times in us."""

    hosts: int
    tokens: int
    others: float
    out_mb: float
    back_mb: float
    launch: float  # all tokens in one
    wire: float  # all rows, both ways
    chunks: int
    two_level: float
    staged_wire: float  # what `staged` sends
    even_tokens: float  # a step, from which on DDP between hosts moves less than rows do
    state_gib: (
        float  # that a call keeps for its backward pass; 0 where the precision does not train
    )

    @property
    def advice(self) -> str:
        """Say whether experts over hosts are worth it."""
        if self.wire <= 0.9 * self.launch:
            return "worth it: the wire fits beside the launch"
        if self.wire <= 1.5 * self.launch:
            return "if memory asks for it: the wire takes as long as the launch"
        return f"wire bound: PP, or DDP from {self.even_tokens / 1e3:.0f} k tokens a step on"


class Given(NamedTuple):
    """What may be known beside sizes.

    measured: us of a launch by tokens of a rank; None: launch_us(). groups: as in other_hosts(). chunks: of which the
    best counts.
    """

    measured: Callable[[float], float] | None = None
    groups: tuple[int, int] | None = None
    chunks: Sequence[int] = CHUNKS


def predict(
    shape: Shape,
    precision: str,
    tokens: int,
    hosts: int,
    fabric: Fabric,
    given: Given | None = None,
) -> Prediction:
    """Predict a layer with the best number of chunks."""
    measured, groups, chunks = given or Given()

    def launch(t: float) -> float:
        return launch_us(shape, precision, t, hosts, fabric) if measured is None else measured(t)

    d, (x, y) = other_hosts(shape, hosts, groups), row_bytes(shape, precision)
    found = []
    for c in chunks:
        part = tokens / c
        if c > chunks[0] and part < LEAST_TOKENS:
            continue
        gathered = part * (d + 1) * 2 * x / fabric.hbm_gb_s / 1e3
        beside = launch(part) if c == 1 else launch(part) / fabric.sms_left
        out, back = fabric.wire_us(part * d * x), fabric.wire_us(part * d * y)
        found.append((pipeline_us(c, out, beside + gathered, back), c))
    best, c = min(found)
    best += fabric.host_us + glue_us(shape, precision, tokens, d, fabric)
    expert = 2 * shape.matrices * shape.hidden * shape.intermediate  # bytes in bf16
    held = shape.num_experts / fabric.per_host * expert
    crossing = shape.top_k * (hosts - 1) / hosts * 2 * shape.hidden * tokens
    return Prediction(
        hosts=hosts,
        tokens=tokens,
        others=d,
        out_mb=tokens * d * x / 1e6,
        back_mb=tokens * d * y / 1e6,
        launch=launch(tokens),
        wire=fabric.wire_us(tokens * d * x) + fabric.wire_us(tokens * d * y),
        chunks=c,
        two_level=best,
        staged_wire=2 * fabric.wire_us(crossing),
        state_gib=state_gib(shape, precision, tokens, hosts, fabric.per_host),
        even_tokens=2 * (hosts - 1) / hosts * held / (2 * d * (x + y)),
    )


def state_gib(shape: Shape, precision: str, tokens: int, hosts: int, per_host: int) -> float:
    """Return GiB of a call's state for max_tokens = tokens: on one host the kernel's, over several also x and ids."""
    if not PRECISIONS[precision].trains:
        return 0.0
    first = Rank(0, hosts * per_host, torch.device("cpu"))
    problem = problem_of(shape, tokens, first, precision)
    names = tuple(map(str, range(hosts)))
    chunks = 1 if hosts == 1 else chunks_of(problem, Hosts(names, per_host), None)
    here = problem if hosts == 1 else inside(problem, Hosts(names, per_host), chunks)
    if here.why_no_window() is not None:
        return 0.0
    part = replace(here, max_tokens=-(-tokens // chunks))
    launches = Plan(here, default_pool_rows(part)).train_state.bytes
    x, _ = row_bytes(shape, precision)
    kept = 0 if hosts == 1 else here.max_tokens * (x - 4 * shape.top_k)  # no weights
    return chunks * (launches + kept) / 2**30


def interpolated(points: Sequence[tuple[int, float]]) -> Callable[[float], float]:
    """points: (tokens, us) of launches that were measured -> us of others: on lines between them, the least below."""
    points = sorted(points)

    def us(tokens: float) -> float:
        if tokens <= points[0][0] or len(points) == 1:
            return points[0][1]
        pairs = list(zip(points, points[1:], strict=False))
        (t0, us0), (t1, us1) = next((p for p in pairs if tokens <= p[1][0]), pairs[-1])
        return us0 + (us1 - us0) * (tokens - t0) / (t1 - t0)

    return us
