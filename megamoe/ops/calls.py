"""Recognize calls like an earlier one: they skip checks, and repeat its allocations and launches."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from megamoe.core.planes import IN_MEMORY, STRIDE_BYTES, SUSPECT_BELOW
from megamoe.core.transforms import records, watched
from megamoe.jit.recording import recording
from megamoe.launch.launches import allocator, current_stream_handle, launch_lock, on_device

F = TypeVar("F", bound=Callable[..., Any])
MAX_KNOWN = 2048  # calls, whose argument blocks have 2 KB each
margins: list[int] = []  # SMs that machines.sm_margin() leaves


class Plan:
    """What a call did: it allocated memory and launched kernels.

    It is complete if each address of a launch was one argument's or in memory that recording.made() saw, and results
    are such memory. Torch's own operations leave results elsewhere: a call that needs some has no complete plan, and
    repeats its argument blocks alone.
    """

    def __init__(self, given: tuple[Any, ...]) -> None:
        self._given = [t.data_ptr() if isinstance(t, Tensor) else None for t in given]
        self._live: list[Any] = []  # what it allocated, while it is recorded
        self._made: list[tuple[int, tuple[Any, ...]]] = []
        self._launches: list[tuple[Any, list[tuple[int, int] | None]]] = []
        self._results: list[int] | None = None
        self._device, self._is_one, self.complete = torch.device("cpu"), False, True

    def allocated(self, t: Tensor) -> None:
        i = len(self._given) + len(self._live)
        self._made.append((i, (tuple(t.shape), t.stride(), t.dtype)))
        self._live.append(t)

    def launched(self, block: Any, addresses: list[int]) -> None:
        self._device = torch.device("cuda", block.launcher.kernel.device)
        self._launches.append((block, [self._place(a) if a else None for a in addresses]))

    def _place(self, address: int) -> tuple[int, int]:
        """Return which of arguments and memory has this address, and its offset there."""
        found = [(i, 0) for i, base in enumerate(self._given) if base == address]
        for i, t in enumerate(self._live, len(self._given)):
            if t.data_ptr() <= address < t.data_ptr() + t.nbytes:
                found.append((i, address - t.data_ptr()))
        self.complete &= len(found) == 1
        return found[0] if found else (0, 0)

    def record(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call a function and see what it does."""
        plans, recording.plans = recording.plans, (*recording.plans, self)
        try:
            found = function(*args, **options)
        finally:
            recording.plans = plans
        self._is_one, first = isinstance(found, Tensor), len(self._given)
        results = [found] if self._is_one else found or ()
        places = [i for t in results for i, other in enumerate(self._live, first) if other is t]
        self.complete &= len(places) == len(results) and bool(self._launches)
        self._results = None if found is None else places
        used = {*places, *(p[0] for _, of in self._launches for p in of if p)}
        self._made = [(i, of) for i, of in self._made if i in used]
        self._live = [None] * len(self._live)
        return found

    def repeat(self, given: tuple[Any, ...]) -> Any:
        """Do it again with other arguments of the same geometry."""
        device, plans = self._device, recording.plans
        with launch_lock, on_device(device):
            tensors, new = [*given, *self._live], allocator(device.type == "cuda")
            for i, of_memory in self._made:
                tensors[i] = new(*of_memory)
                for plan in plans:
                    plan.allocated(tensors[i])
            for block, places in self._launches:
                addresses = [0 if p is None else tensors[p[0]].data_ptr() + p[1] for p in places]
                block.launch(addresses, current_stream_handle(device.index))
                for plan in plans:
                    plan.launched(block, addresses)
        if self._results is None:
            return None
        results = [tensors[i] for i in self._results]
        return results[0] if self._is_one else tuple(results)


_plans: dict[Any, Plan | None] = {}  # None: of calls that recorded gradients


def is_observed() -> bool:
    """Return whether a mode, a transform or a tracer has to see what operators do."""
    return torch.compiler.is_compiling() or watched() or torch._C._get_tracing_state() is not None


def repeats(function: F, seen: bool = False) -> F:
    """Let calls like earlier ones, in shapes, strides, types, devices and options, skip what is `unless_known`.

    Those that record no gradients repeat launches, too. seen: the caller has looked for modes of torch.
    """

    @wraps(function)
    def run(*args: Any, **options: Any) -> Any:
        if not seen and is_observed():
            return function(*args, **options)
        given = (*args, *options.values())
        facts = [_facts(v) if isinstance(v, Tensor) else (type(v), v) for v in given]
        key: Any = (function, *margins[-1:], *options, *facts)
        try:
            known, plan = key in _plans, _plans.get(key)
        except TypeError:  # an argument of a wrong type, which the checks name
            known, plan, key = False, None, None
        plain = seen or not records([t for t in given if isinstance(t, Tensor)])
        if plain and plan is not None and plan.complete:
            return plan.repeat(given)
        before = recording.known, recording.blocks
        blocks = [b for b, _ in plan._launches] if plain and plan is not None else ()
        recording.known, recording.blocks = known, iter(blocks)
        try:
            if plain and key is not None and plan is None:
                found = (plan := Plan(given)).record(function, *args, **options)
            else:
                found = function(*args, **options)
        finally:
            recording.known, recording.blocks = before
        if len(_plans) == MAX_KNOWN:
            _plans.clear()
        if key is not None:
            _plans[key] = plan
        return found

    return cast(F, run)


def _facts(t: Tensor) -> Any:
    """Return what the checks read of a tensor; what cannot be a key of one that may be freed, or is not aligned."""
    if type(t) not in IN_MEMORY or t.layout != torch.strided or t.is_nested:
        return [t]
    place = t.data_ptr()
    suspect = place < SUSPECT_BELOW or place % STRIDE_BYTES
    return [t] if suspect else (t.shape, t.stride(), t.dtype, t.device)


def unless_known(check: Callable[..., None]) -> Any:
    """Make a check one that repeats() skips."""
    return wraps(check)(lambda *args, **given: None if recording.known else check(*args, **given))
