"""Compare gradients and the stages of the backward pass with the oracle's: megamoe/backends/reference/backward.py."""

from __future__ import annotations

import torch
from torch import Tensor

from megamoe.core.config import Problem
from megamoe.core.table import PRECISIONS, TRAINED
from megamoe.testing.compare import Tolerance, rounding_step
from megamoe.testing.intermediates import (
    BF16_STEP,
    DEVIATIONS,
    ENOUGH,
    LARGE_ROW,
    LIMIT,
    SUM_NOISE,
    StageChecker,
    few_steps,
    rms,
)

# The oracle rounds where the kernel does and starts from the pre-activations that the kernel saved: what is left is
# the order of sums and the roundings it tips over. In FP8 dx_rows are sums of dgu in e4m3, as y_rows are of h, and all
# of dx comes from them: LIMIT.
KERNEL_LIMIT = 4e-3
OF_DX = ("dx_rows", "partials", "dx")
# Against fp32 throughout on bf16 masters and unquantized x, in means over ENOUGH elements. BF16: the pre-activations,
# dgu, a row, a partial and dx are rounded, sqrt(5) * 1.7e-3 = 3.7e-3. FP8: forward's quantized x and weights move the
# pre-activations, and x itself in dw13, by 2.6e-2 each; staged computes with quantized weights and h in backward, too.
# Packed weights: backward is BF16's, forward's pre-activations are moved as in FP8 if x is quantized.
FP32_LIMIT = {name: 1e-1 if PRECISIONS[name].x.scaled else 1e-2 for name in TRAINED}
# Single elements of dgu and hs: the noise of dh, 1e-3 of its root mean square among millions (above), where it
# meets a large derivative of the activation, up to five times the average.
# FP8 keeps fewer bits of dh's sums: as many times SUM_NOISE.
PRODUCT_NOISE = {"bf16": 5e-3, "fp8": 5e-2}

# What weight gradients in e4m3 multiply, as values: sums tip over roundings of dgu and hs to e4m3, and so the
# gradients, as they tip over those of dgu that dx_rows are made of: LIMIT. A step is at most 1/8 of a number, and at
# least 2^-9 of its block's scale. That scale depends on all rows of the block, where the oracle may have a sample: a
# power of two, at most twice the largest / 448, and twice as large again if the sample lacks the largest.
E4M3_STEP, E4M3_LEAST, E4M3_COPIED = 2**-3, 2**-9 * 4 / 448, 1e-4
OPERANDS = ("dy_rows", "x_rows", "dgu", "hs")

GRADIENTS = ("dx", "d_topk_weights", "dw13", "dw2", "db13", "db2")
COPIED = ("dy_rows", "x_rows", "row_weight")
BACKWARD_STAGES = ("gate_up", *COPIED, "dgu", "hs", "d_s", "dx_rows", "partials")
OF_EXPERTS = ("dw13", "dw2", "db13", "db2")  # experts along the first dimension


class GradientChecker(StageChecker):
    """Compares the stages and gradients of one case.

    flips: values lie near a clamp, and a rounding moves some to its other side, where their gradient is another. Seen
        1.8e-1 of dx, FP8: nothing is asked then of the comparison with fp32, whose values are not rounded.
    """

    def __init__(
        self,
        problem: Problem,
        verbose: bool = False,
        flips: bool = False,
        weight_gradients: str = "bf16",
    ) -> None:
        super().__init__(problem, verbose)
        self.flips, self.in_e4m3 = flips, weight_gradients == "e4m3"
        self.products = "bf16" if problem.formats.packed else self.precision  # of backward

    def compare_kernel(
        self,
        name: str,
        got: Tensor,
        expected: Tensor,
        passes: int = 1,
        size: Tensor | None = None,
    ) -> None:
        """Compare with the oracle that rounds as the kernel does, from equal pre-activations.

        passes: of the launch. Each stores the sums of experts in bf16; the oracle rounds them once.
        size: as in judge().
        """
        if got.shape != expected.shape:
            self.errors[name] = float("inf")
            shapes = f"{list(got.shape)}, expected {list(expected.shape)}"
            return self.require(False, f"{name}: shape {shapes}")
        copied = name in COPIED
        limit = 0.0 if copied else self._limit(name, expected.numel())
        if name in OF_EXPERTS:
            limit *= passes**0.5
        tolerance: Tolerance = 0.0 if copied else self.element(name, got, expected, size)
        if copied and self.in_e4m3 and name in OPERANDS:
            limit, tolerance = E4M3_COPIED, _least_step(expected)
        return self.judge(name, got, expected, limit, tolerance, size)

    def compare_fp32(
        self, name: str, got: Tensor, expected: Tensor, roundings: int | None = None
    ) -> None:
        """Compare with the oracle that rounds nothing: the price of all roundings.

        roundings: the number of values whose errors all elements share, if smaller than that of elements. A weight
            gradient of one row has H * I elements, of I values of h: with 16 of these, 1 in 5 is 0.1 off, simulated.
        """
        independent = expected.numel() if roundings is None else min(roundings, expected.numel())
        strict = independent >= ENOUGH and not self.flips
        limit = FP32_LIMIT[self.precision] if strict else float("inf")
        self.judge(f"{name}_fp32", got, expected, limit)

    def compare_added(self, name: str, got: Tensor, stored: Tensor, passes: int) -> None:
        """Compare a gradient that was added to fp32 with the one stored as bf16, both in fp32, of one call.

        One pass rounds each element once. Several store, read and round again what may cancel later: by then the
        elements' own size says nothing, and they may be as far apart as sums are.
        """
        tolerance: Tolerance = _rounded_once
        if passes > 1:
            noise = DEVIATIONS * LARGE_ROW * KERNEL_LIMIT * rms(stored, True)
            tolerance = _rounded_once(got, stored) + noise
        if stored.numel():
            self.judge(f"{name}_added", got, stored, KERNEL_LIMIT * passes, tolerance)

    def _limit(self, name: str, elements: int) -> float:
        limit = self._sums(name)
        if self.problem.formats.dy.scaled and name in OF_DX:
            limit = max(limit, few_steps(self.problem, 1, elements))
        return limit if elements >= ENOUGH else max(limit, BF16_STEP)

    def element(
        self, name: str, got: Tensor, expected: Tensor, size: Tensor | None = None
    ) -> Tensor:
        """Return how far apart single elements may be: a step of the stored format, and the noise of their sums."""
        larger = torch.maximum(got.double().abs(), expected.double().abs())
        step = rounding_step(larger, got.dtype)
        if name == "gate_up":
            return step + SUM_NOISE[self.precision] * rms(expected)
        if self.in_e4m3 and name in OPERANDS:
            step = E4M3_STEP * larger + _least_step(expected)
        if name in ("dgu", "hs"):
            return step + PRODUCT_NOISE[self.products] * rms(expected)
        noise = LARGE_ROW * self._sums(name)
        if name in OF_EXPERTS:  # an expert of one row has the noise of its dgu
            noise = max(noise, PRODUCT_NOISE[self.products])
            step = step + self._flipped(name, larger)
        of = expected if size is None else torch.maximum(expected.abs(), size)
        return step + DEVIATIONS * noise * rms(of, name in OF_EXPERTS)

    def _flipped(self, name: str, larger: Tensor) -> Tensor | float:
        """Return how far one step in one number of dgu or hs moves the sums that it is part of.

        That is a row of dw13 or a column of dw2, which is hardly more than that number contributes if the expert has
        few rows. Among many rows it is less than the noise. larger: magnitudes of the sums, of both sides.
        """
        if not self.in_e4m3 or name == "db2" or not larger.numel():
            return 0.0
        along = {"dw13": -1, "dw2": -2}.get(name)
        return E4M3_STEP * (larger if along is None else larger.amax(along, keepdim=True))

    def _sums(self, name: str) -> float:
        # gate_up: forward's own
        tipped = self.in_e4m3 and name in (*OPERANDS, *OF_EXPERTS)
        of = self.precision if name == "gate_up" else self.products
        return LIMIT[of] if tipped or name in ("gate_up", *OF_DX) else KERNEL_LIMIT


def _least_step(expected: Tensor) -> float:
    """Return the largest distance of neighbours that are small in their blocks."""
    return E4M3_LEAST * float(expected.abs().amax()) if expected.numel() else 0.0


def _rounded_once(_: Tensor, stored: Tensor) -> Tensor:
    """Return how far an fp32 gradient may be from one that was stored as bf16."""
    return rounding_step(stored, torch.bfloat16) + 1e-6
