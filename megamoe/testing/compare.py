"""Compare two tensors: relative Frobenius error, largest error, and where it first goes wrong."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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


def compare(actual: Tensor, expected: Tensor, tolerance: float | Tensor = 0.0) -> Comparison:
    """Compare in fp64 on actual's device; elements at most `tolerance` apart do not count as differing."""
    if actual.shape != expected.shape:
        raise AssertionError(f"shape {list(actual.shape)}, expected {list(expected.shape)}")
    a, e = actual.detach().double(), expected.detach().to(actual.device).double()
    both_finite = a.isfinite() & e.isfinite()
    same = (a == e) | (a.isnan() & e.isnan())
    error = torch.where(both_finite, (a - e).abs(), torch.where(same, 0.0, float("inf")))
    norm = torch.where(e.isfinite(), e, 0.0).norm().item()
    error_norm = error.norm().item()
    relative = 0.0 if error_norm == 0 else (error_norm / norm if norm else float("inf"))
    wrong = (error > tolerance) | error.isinf()
    if not bool(wrong.any()):
        return Comparison(
            relative, error.max().item() if error.numel() else 0.0, 0, None, None, None
        )
    flat = int(wrong.flatten().int().argmax())
    first = tuple(
        int(i) for i in torch.unravel_index(torch.tensor(flat, device="cpu"), wrong.shape)
    )
    values = a.flatten()[flat].item(), e.flatten()[flat].item()
    return Comparison(relative, error.max().item(), int(wrong.sum()), first, *values)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors of one type are equal bit by bit: NaN equals itself, -0 is not 0."""
    bits = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.view(bits), b.view(bits))


def assert_close(
    actual: Tensor, expected: Tensor, *, relative: float, name: str = "result"
) -> Comparison:
    """Raise AssertionError when the relative Frobenius error is larger than `relative`, or NaN."""
    found = compare(actual, expected)
    if not found.relative <= relative:
        raise AssertionError(f"{name}: {found} (allowed: relative {relative:g})")
    return found
