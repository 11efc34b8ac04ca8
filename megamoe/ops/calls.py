"""Recognize calls like earlier ones: they skip checks, and repeat what the earlier one allocated and launched."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from megamoe.core.planes import IN_MEMORY, STRIDE_BYTES, SUSPECT_BELOW
from megamoe.core.transforms import records, watched
from megamoe.jit.recording import launched, made, recording
from megamoe.launch.launches import allocator, current_stream_handle, launch_lock, on_device

F = TypeVar("F", bound=Callable[..., Any])
MAX_KNOWN = 4096  # calls
margins: list[int] = []  # SMs that machines.sm_margin() leaves


class Plan:
    """What a call did: it allocated memory and launched kernels.

    It is complete if each address of a launch was one argument's or in memory that recording.made() saw, and results
    are such memory. Torch's own operations leave results elsewhere, so a call that needs some has no complete plan.
    """

    def __init__(self, given: tuple[Any, ...]) -> None:
        self._given = [t.data_ptr() if isinstance(t, Tensor) else None for t in given]
        self._live: list[Tensor] = []  # while it is recorded
        self._others: list[None] = []
        self._made: list[tuple[Any, ...]] = []
        self._launches: list[tuple[Any, list[tuple[int, int] | None]]] = []
        self._results: list[int] | None = []
        self._device, self._is_one, self.complete = torch.device("cpu"), False, True

    def allocated(self, t: Tensor, zeros: bool) -> None:
        self._live.append(t)
        self._made.append((tuple(t.shape), t.stride(), t.dtype, zeros))

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

    def end(self, found: Any) -> None:
        """found: what the call returned."""
        self._is_one = isinstance(found, Tensor)
        results = [found] if self._is_one else found or ()
        places = [i for t in results for i, other in enumerate(self._live) if other is t]
        self.complete &= len(places) == len(results) and bool(self._launches)
        first = len(self._given)
        self._results = None if found is None else [first + i for i in places]
        used = {first + i for i in places} | {p[0] for _, of in self._launches for p in of if p}
        self._made = [(i, of) for i, of in enumerate(self._made, first) if i in used]
        self._live, self._others = [], [None] * len(self._live)

    def repeat(self, given: tuple[Any, ...]) -> Any:
        """Do it again with other arguments of the same geometry."""
        device = self._device
        with launch_lock, on_device(device):
            tensors, new = [*given, *self._others], allocator(device.type == "cuda")
            for i, (shape, strides, dtype, zeros) in self._made:
                tensors[i] = t = new(shape, strides, dtype)
                if zeros:
                    t.zero_()
                if recording.plans:
                    made(t, zeros)
            for block, places in self._launches:
                of = [0 if p is None else tensors[p[0]].data_ptr() + p[1] for p in places]
                block.launch(of, current_stream_handle(device.index))
                if recording.plans:
                    launched(block, of)
        if self._results is None:
            return None
        results = [tensors[i] for i in self._results]
        return results[0] if self._is_one else tuple(results)


class _Call(threading.local):
    """What this thread runs. known: a call like one that was validated."""

    known = False


call, _validated, _plans = _Call(), set[Any](), dict[Any, Plan]()


def repeats(function: F) -> F:
    """Repeat calls of a function, which records no gradients, by their plans."""

    @wraps(function)
    def run(*args: Any) -> Any:
        of = [_facts(value) if isinstance(value, Tensor) else value for value in args]
        key = (function, *margins[-1:], *of)
        try:
            plan = _plans.get(key)
        except TypeError:
            return function(*args)
        return _planned(key, plan, args, function, *args)

    return cast(F, run)


def _planned(
    key: Any, plan: Plan | None, given: Any, function: Any, *args: Any, **options: Any
) -> Any:
    if plan is not None:
        return plan.repeat(given) if plan.complete else function(*args, **options)
    plan, before = Plan(given), recording.plans
    recording.plans = *before, plan
    try:
        found = function(*args, **options)
    finally:
        recording.plans = before
    plan.end(found)
    if len(_plans) == MAX_KNOWN:
        _plans.clear()
    _plans[key] = plan
    return found


def validates(function: F) -> F:
    """Skip what is `unless_known` in calls like earlier ones: in shapes, strides, types, devices and options."""

    @wraps(function)
    def run(*args: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling() or watched() or torch._C._get_tracing_state():
            return function(*args, **options)
        given = (*args, *options.values())
        key: Any = (function, *margins[-1:], *options, *map(_facts, given))
        try:
            call.known = key in _validated
        except TypeError:  # an argument of a wrong type, which the checks name
            return function(*args, **options)
        try:
            if records([t for t in given if isinstance(t, Tensor)]):
                found = function(*args, **options)
            else:
                found = _planned(key, _plans.get(key), given, function, *args, **options)
        finally:
            call.known = False
        if len(_validated) == MAX_KNOWN:
            _validated.clear()
        _validated.add(key)
        return found

    return cast(F, run)


def _facts(value: Any) -> Any:
    """Return what the checks read of an argument: with one that may have been freed, or not be aligned, its place."""
    if type(value) not in IN_MEMORY or value.layout != torch.strided or value.is_nested:
        return (type(value), value) if not isinstance(value, Tensor) else [value]
    place = value.data_ptr()
    suspect = place < SUSPECT_BELOW or place % STRIDE_BYTES
    return [value] if suspect else (value.shape, value.stride(), value.dtype, value.device)


def unless_known(check: Callable[..., None]) -> Any:
    """Make a check one that validates() skips."""
    return wraps(check)(lambda *args, **given: None if call.known else check(*args, **given))
