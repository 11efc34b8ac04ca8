"""The one timer of all that is timed in turns with others: flush, spin, events, cool and hot; and by the host's clock.

cool: before every sample the L2 is flushed (a 256 MB memset), the device idles until all ranks are there, spins until
every host has queued the call, and the ranks are aligned on the stream by a one-element all-reduce: so no rank starts
late because its host did. Contenders take turns, sample by sample. clean: the same behind a flush that leaves no dirty
lines. hot: calls back to back for half a second first, then the timed ones without flush or gap, as in training; one
contender behind the other.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

FLUSH_BYTES = 256 << 20
SPIN_CYCLES = 1_500_000  # about 0.8 ms: longer than any rank's host takes to queue what follows
HOT_SECONDS = 0.5
MODES = ("cool", "clean", "hot")


def modes_of(mode: str) -> tuple[str, ...]:
    """Return what --mode asks for: one of MODES, or both cool and hot."""
    return ("cool", "hot") if mode == "both" else (mode,)


@dataclass(frozen=True, eq=False)
class Contender:
    """Something that is timed in turns with others.

    timed: what is timed. It is given what `before` returns, which is called before it each time, outside of the timed
    region. Both are collective.
    """

    name: str
    timed: Callable[[Any], Any]
    before: Callable[[], Any] = lambda: None


def stopwatch(on_gpu: bool, call: Callable[..., object], *given: object) -> Callable[[], float]:
    """Call once; the result gives the time in us when asked after a synchronisation."""
    if not on_gpu:
        start = time.perf_counter()
        call(*given)
        taken = (time.perf_counter() - start) * 1e6
        return lambda: taken
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call(*given)
    end.record()
    return lambda: begin.elapsed_time(end) * 1e3


class Timer:
    """Times contenders on one rank; all methods are collective, where ranks have joined.

    samples: of a median. watch: called with a contender behind each of its samples, or of hot ones behind the last.
    """

    def __init__(
        self,
        device: torch.device,
        samples: int,
        watch: Callable[[Contender], object] = lambda contender: None,
    ) -> None:
        self.device, self.samples, self.watch = device, samples, watch
        self.on_gpu = device.type == "cuda"
        self.flag = torch.zeros(1, device=device)
        num_bytes = FLUSH_BYTES if self.on_gpu else 0
        self._flushed = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def flush(self, clean: bool = False) -> None:
        """Write more than the L2 holds, as others' benchmarks do; clean: then read as much, too.

        What was written stays there dirty, and writing it back costs what is timed 3 to 5 us (H200, qwen3-30b in FP8,
        local experts of EP4, 8 tokens: 88.6; behind a read of as much again 85.9).
        """
        self._flushed.zero_()
        if clean:
            self._flushed.view(torch.int64).sum()

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def _meet_hosts(self) -> None:
        if dist.is_initialized():
            dist.barrier()

    def _align(self) -> None:
        if dist.is_initialized():
            dist.all_reduce(self.flag)

    def medians(self, contenders: Sequence[Contender], mode: str = "cool") -> list[float]:
        """Return the median of each contender in us, of the rank whose is the largest. mode: one of MODES."""
        found = self._hot(contenders) if mode == "hot" else self._cool(contenders, mode == "clean")
        return [worst(us, self.device) for us in found]

    def _cool(self, contenders: Sequence[Contender], clean: bool) -> list[float]:
        """Return each contender's median on this rank, with a cold L2, from an idle device; in turns."""
        taken: list[list[float]] = [[] for _ in contenders]
        for _ in range(self.samples):
            for contender, times in zip(contenders, taken, strict=True):
                before = contender.before()
                self.synchronize()
                self._meet_hosts()
                self.flush(clean)
                if self.on_gpu:
                    torch.cuda._sleep(SPIN_CYCLES)
                self._align()
                read = stopwatch(self.on_gpu, contender.timed, before)
                del before  # a state, or a graph
                self.synchronize()
                times.append(read())
                self.watch(contender)
        return [statistics.median(times) for times in taken]

    def _hot(self, contenders: Sequence[Contender]) -> list[float]:
        """Return each contender's median on this rank, back to back, with what comes before a call in between."""
        medians = []
        for contender in contenders:
            self.synchronize()
            start = time.perf_counter()
            contender.timed(contender.before())
            self.synchronize()
            # All ranks must make the same number of collective calls: the slowest decides.
            once = worst(time.perf_counter() - start, self.device)
            seconds = HOT_SECONDS if self.on_gpu else 0.0
            for _ in range(int(min(seconds / once, 10_000))):
                contender.timed(contender.before())
            self._align()
            reads = [
                stopwatch(self.on_gpu, contender.timed, contender.before())
                for _ in range(self.samples)
            ]
            self.synchronize()
            medians.append(statistics.median(read() for read in reads))
            self.watch(contender)
        return medians

    def host(
        self, call: Callable[[], object], calls: int, repeats: int, warm_up: int
    ) -> list[float]:
        """Return the means in us of `repeats` runs of `calls` calls, by the host's clock.

        The device's queue is emptied between runs, outside of the timed region.
        """
        for _ in range(warm_up):
            call()
        means = []
        for _ in range(repeats):
            self.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            means.append((time.perf_counter() - start) / calls * 1e6)
        self.synchronize()
        return means


def worst(value: float, device: torch.device) -> float:
    """Return the largest of the ranks' values. Collective, where ranks have joined."""
    tensor = torch.tensor([value], dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.item()
