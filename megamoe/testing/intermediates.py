"""Compare the stages of a layer with the oracle's, with a bound on how far two correct results may differ."""

from __future__ import annotations

import torch
from torch import Tensor

from megamoe.backends.reference.quant import dequantize_rows
from megamoe.core.config import Problem
from megamoe.core.table import by_precision
from megamoe.testing.compare import Tolerance, compare, rounding_step

# Relative Frobenius error. The oracle rounds where the kernel rounds: what is left is the order of sums, and roundings
# that it tips over. docs/numerics.md
LIMIT = by_precision({"bf16": 4e-3, "fp8": 1e-2, "fp8_channel": 2e-2})
# y in BF16 against fp32: h, y_rows, partials and y are rounded, 1.7e-3 each. A mean: not applied to fewer elements.
FP32_LIMIT, ENOUGH = 5e-3, 256
BF16_STEP = 2**-7  # of its element, at most: the limit for so few elements that one step decides
# Steps in few elements of h do not average. In FP8 a step of a group's largest element is 1/14 of it, and that is at
# most 12 times the root mean square (sqrt(N) times, of N < 144 elements). Two of them: sqrt(2) / 14 * 12 / sqrt(N).
TWO_STEPS, FEWEST = 1.2, 144

# Single elements. Before it is rounded, a value has the noise of its sum; then each side moves by half a step at most.
# So the sides are apart by one step of the stored format, at the larger value, and that noise.
#
# Noise of h, largest in its root mean square: where a large gate meets a large up. BF16: tensor cores truncate sums to
# 24 bits, 3e-4 for K = 7168. FP8: they keep 13 fractional bits while they add 32 products, 3e-3. Both simulated for
# ten thousand elements, 2026-11-21; millions reach three times as far. FP8 with all of K in place: 5e-2, and 1.3e-2 in
# the relative error of h (likewise, 2026-11-26).
SUM_NOISE = by_precision({"bf16": 2e-3, "fp8": 2e-2, "fp8_channel": 2e-1})
# Noise of later stages: a sum of steps in elements of h, times random weights, thus nearly normal. Five deviations
# of the worst row, or of all rows with norms up to five times the average.
DEVIATIONS, LARGE_ROW = 5, 5

COPIED = ("x_q", "x_scale", "x_pool", "x_pool_scale")  # or quantized by one formula: equal bits
STAGES = (*COPIED, "h", "h_scale", "y_rows", "partials", "y")

Stages = dict[str, Tensor]  # rows along the first dimension


class StageChecker:
    """Compares the stages of one case. Keeps whether all were good, what to print, and the relative errors."""

    def __init__(self, problem: Problem, verbose: bool = False) -> None:
        self.problem, self.precision = problem, problem.precision
        self.verbose, self.good = verbose, True
        self.lines: list[str] = []
        self.errors: dict[str, float] = {}

    def compare_stage(self, name: str, got: Stages, expected: Stages, rows: int) -> None:
        """Compare one of the stages, which depends on so many rows of h."""
        if got[name].shape != expected[name].shape:
            shapes = [list(stages[name].shape) for stages in (got, expected)]
            self.errors[name] = float("inf")
            return self.require(False, f"{name}: shape {shapes[0]}, expected {shapes[1]}")
        limit = 0.0 if name in COPIED else self.limit(rows, expected[name].numel())
        tolerance = self._tolerance(name, got, expected, limit)
        return self.judge(name, _values(got, name), _values(expected, name), limit, tolerance)

    def limit(self, rows: int, elements: int = ENOUGH) -> float:
        """Return the largest relative error of so many elements that depend on so many rows of h."""
        return max(LIMIT[self.precision], few_steps(self.problem, rows, elements))

    def _tolerance(self, name: str, got: Stages, expected: Stages, limit: float) -> float | Tensor:
        """Return how far apart single elements may be."""
        if name in COPIED:
            return 0.0
        if name == "h_scale":  # amax / largest
            largest = self.problem.formats.h.largest
            return SUM_NOISE[self.precision] * rms(_values(expected, "h")) / largest
        larger = torch.maximum(got[name].double().abs(), expected[name].double().abs())
        step = rounding_step(larger, got[name].dtype)
        if name != "h":
            noise = DEVIATIONS * max(self.limit(rows=1), LARGE_ROW * limit)
            return step + noise * rms(expected[name])
        if "h_scale" in expected:
            step = dequantize_rows(step, torch.maximum(got["h_scale"], expected["h_scale"]))
        return step + SUM_NOISE[self.precision] * rms(_values(expected, "h"))

    def judge(
        self,
        name: str,
        got: Tensor,
        expected: Tensor,
        limit: float,
        tolerance: Tolerance = float("inf"),
        size: Tensor | None = None,
    ) -> None:
        """Compare two tensors by their relative error and by the error of each element.

        size: of the terms whose sums they are, if these may cancel: errors are relative to the larger of both.
        """
        found = compare(got, expected, tolerance)
        relative = found.relative
        if size is not None and size.any():
            relative *= min(1.0, float(rms(expected) / rms(size)))
        self.errors[name] = relative
        good = relative <= limit and found.differing == 0
        self.good &= good
        if self.verbose or not good:
            where = "" if found.first is None else f"; too far: {found}"
            self.lines.append(
                f"  {'ok  ' if good else 'FAIL'} {name:<12} relative error {relative:.2e} "
                f"(limit {limit:.2g}), largest {found.largest:.2e} at rms {rms(expected):.2e}{where}"
            )

    def require(self, condition: bool, message: str) -> None:
        """Note a failure unless `condition` holds."""
        if not condition:
            self.good = False
            self.lines.append("  FAIL " + message)


def few_steps(problem: Problem, rows: int, elements: int) -> float:
    """Return the relative error that single roundings cause in few elements, or in so few rows of h behind them."""
    of_h = rows * problem.intermediate
    if problem.formats.h.scaled:
        return TWO_STEPS / max(of_h, FEWEST) ** 0.5
    return 0.0 if min(elements, of_h) >= ENOUGH else BF16_STEP


def _values(stages: Stages, name: str) -> Tensor:
    """Return a stage as numbers. Codes of h cannot be compared: a step of amax moves those of its whole group."""
    if name == "h" and "h_scale" in stages:
        return dequantize_rows(stages["h"], stages["h_scale"])
    return stages[name]


def rms(values: Tensor, by_expert: bool = False) -> Tensor:
    """Return the root mean square, of each expert by itself: one with few rows has small gradients.

    Rows of zeros, of tokens that go nowhere, say nothing of the others.
    """
    squares = values.double().square()
    if by_expert:
        return squares.flatten(1).mean(1).sqrt().view(-1, *[1] * (values.dim() - 1))
    if values.dim() > 1:
        squares = squares[squares.flatten(1).any(1)]
    return squares.mean().sqrt() if squares.numel() else squares.new_zeros(())
