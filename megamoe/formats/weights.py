"""The experts of one rank: their tensors, and what shapes and dtypes they must have."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from megamoe.config import Problem
from megamoe.errors import ArgumentError
from megamoe.formats.quantization import (
    E4M3,
    dequantize_blockwise,
    num_groups,
    quantize_blockwise,
)


@dataclass
class ExpertWeights:
    """The experts of one rank. L local experts, P planes; contract in docs/architecture.md.

    w13: [L, P*I, H] bf16 or e4m3    w13_scale: [L, P*ceil(I/128), ceil(H/128)] fp32, with e4m3 only
    w2:  [L, H, I]   bf16 or e4m3    w2_scale:  [L, ceil(H/128), ceil(I/128)] fp32, with e4m3 only
    b13: [L, P*I] fp32 or None       b2: [L, H] fp32 or None
    """

    w13: Tensor
    w2: Tensor
    b13: Tensor | None = None
    b2: Tensor | None = None
    w13_scale: Tensor | None = None
    w2_scale: Tensor | None = None

    def named(self) -> dict[str, Tensor]:
        """Return the tensors that are there, by name."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def validate(self, problem: Problem, device: torch.device | None = None) -> None:
        """Raise ArgumentError unless every tensor fits the problem and lies on `device`."""
        have = self.named()
        expected = expected_weights(problem)
        for name, (shape, dtype) in expected.items():
            if name not in have:
                hint = ""
                if name.endswith("_scale"):
                    hint = ' (precision "fp8": see megamoe.formats.quantization.quantize_blockwise)'
                raise ArgumentError(f"weights.{name}", None, f"{dtype} {list(shape)}{hint}")
            check_tensor(f"weights.{name}", have[name], shape, dtype, device or self.w13.device)
        for name in have.keys() - expected.keys():
            raise ArgumentError(f"weights.{name}", "given", f"None for {_kind(problem)}")

    def quantized(self, problem: Problem) -> ExpertWeights:
        """Return FP8 weights made from these bf16 ones."""
        q13, s13 = quantize_blockwise(self.w13, problem.activation.planes)
        q2, s2 = quantize_blockwise(self.w2)
        return ExpertWeights(q13, q2, self.b13, self.b2, s13, s2)

    def dense(self, problem: Problem, dtype: torch.dtype) -> ExpertWeights:
        """Return weights without scales: these when they are bf16, else dequantized to `dtype`."""
        if self.w13_scale is None or self.w2_scale is None:
            return self
        w13 = dequantize_blockwise(self.w13, self.w13_scale, problem.activation.planes, dtype)
        w2 = dequantize_blockwise(self.w2, self.w2_scale, 1, dtype)
        return ExpertWeights(w13, w2, self.b13, self.b2)


def _kind(problem: Problem) -> str:
    return f"precision {problem.precision!r} with bias={problem.bias}"


def expected_weights(problem: Problem) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return name -> (shape, dtype) of every tensor that ExpertWeights must hold."""
    num, planes = problem.num_local_experts(problem.rank), problem.activation.planes
    h, i = problem.hidden, problem.intermediate
    fp8 = problem.precision == "fp8"
    dtype = E4M3 if fp8 else torch.bfloat16
    table = {"w13": ((num, planes * i, h), dtype), "w2": ((num, h, i), dtype)}
    if problem.bias:
        table["b13"] = ((num, planes * i), torch.float32)
        table["b2"] = ((num, h), torch.float32)
    if fp8:
        table["w13_scale"] = ((num, planes * num_groups(i), num_groups(h)), torch.float32)
        table["w2_scale"] = ((num, num_groups(h), num_groups(i)), torch.float32)
    return table


def check_tensor(
    name: str,
    value: object,
    shape: tuple[int, ...],
    dtype: torch.dtype | tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    """Raise ArgumentError unless `value` is a contiguous tensor of this shape, dtype and device."""
    if not isinstance(value, Tensor):
        raise ArgumentError(name, type(value).__name__, "a tensor")
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    if value.dtype not in dtypes:
        raise ArgumentError(f"{name}.dtype", value.dtype, " or ".join(map(str, dtypes)))
    if tuple(value.shape) != shape:
        raise ArgumentError(f"{name}.shape", list(value.shape), str(list(shape)))
    if value.device != device:
        raise ArgumentError(f"{name}.device", value.device, f"{device}, where the others are")
    if not value.is_contiguous():
        raise ArgumentError(f"{name}.stride()", value.stride(), "contiguous, row-major")
