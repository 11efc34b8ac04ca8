"""Compare two tensors: relative Frobenius error, largest error, and the first place that is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Tolerance = float | Tensor | Callable[[Tensor, Tensor], Tensor]
AT_ONCE = 1 << 26  # elements in fp64: a few GB with all that is made of them


@dataclass(frozen=True)
class Comparison:
    """The difference of `actual` to `expected`; inf where only one is NaN or infinite."""

    relative: float  # ||actual - expected|| / ||expected||, Frobenius
    largest: float  # max |actual - expected|
    differing: int  # elements that are not equal; NaN equals NaN
    first: tuple[int, ...] | None  # coordinates of the first of them
    actual: float | None  # its two values
    expected: float | None

    def __str__(self) -> str:
        if self.first is None:
            return "equal"
        at = ", ".join(map(str, self.first))
        return (
            f"relative error {self.relative:.3g}, largest {self.largest:.3g}, {self.differing} "
            f"differ, first at [{at}]: {self.actual:.8g}, expected {self.expected:.8g}"
        )


def rounding_step(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the distance of neighbouring numbers of a float format at |value|, in fp64."""
    info = torch.finfo(dtype)
    normal = value.double().abs().clamp(min=info.smallest_normal)  # numbers below share its step
    return torch.ldexp(torch.full_like(normal, info.eps), torch.frexp(normal).exponent - 1)


def compare(actual: Tensor, expected: Tensor, tolerance: Tolerance = 0.0) -> Comparison:
    """Compare in fp64 on actual's device; elements at most `tolerance` apart do not count as differing.

    tolerance: of all elements, of each, or a function of both tensors, which is given some elements at a time.
    """
    if actual.shape != expected.shape:
        raise AssertionError(f"shape {list(actual.shape)}, expected {list(expected.shape)}")
    if isinstance(tolerance, Tensor):
        tolerance = tolerance.broadcast_to(actual.shape).flatten()
    got, want = actual.detach().flatten(), expected.detach().to(actual.device).flatten()
    error_norm, norm, largest, differing = 0.0, 0.0, 0.0, 0
    first = None
    for start in range(0, got.numel(), AT_ONCE):
        some = slice(start, start + AT_ONCE)
        if isinstance(tolerance, Tensor):
            allowed: float | Tensor = tolerance[some]
        else:
            allowed = tolerance(got[some], want[some]) if callable(tolerance) else tolerance
        a, e = got[some].double(), want[some].double()
        both_finite = a.isfinite() & e.isfinite()
        same = (a == e) | (a.isnan() & e.isnan())
        error = torch.where(both_finite, (a - e).abs(), torch.where(same, 0.0, float("inf")))
        wrong = (error > allowed) | error.isinf()
        norm = math.hypot(norm, torch.where(e.isfinite(), e, 0.0).norm().item())
        error_norm = math.hypot(error_norm, error.norm().item())
        largest = max(largest, error.max().item())
        of_these = int(wrong.sum())
        if of_these and first is None:
            first = start + int(wrong.int().argmax())
        differing += of_these
    relative = 0.0 if error_norm == 0 else (error_norm / norm if norm else float("inf"))
    if first is None:
        return Comparison(relative, largest, 0, None, None, None)
    at = torch.unravel_index(torch.tensor(first, device="cpu"), actual.shape)
    values = float(got[first]), float(want[first])
    return Comparison(relative, largest, differing, tuple(map(int, at)), *values)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors of one type are equal bit by bit: NaN equals itself, -0 is not 0."""
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.view(bits), b.view(bits))


def assert_close(
    actual: Tensor, expected: Tensor, *, relative: float, name: str = "result"
) -> Comparison:
    """Raise AssertionError when the relative Frobenius error is larger than `relative`, or NaN."""
    found = compare(actual, expected)
    if not found.relative <= relative:
        raise AssertionError(f"{name}: {found} (allowed: relative {relative:g})")
    return found
