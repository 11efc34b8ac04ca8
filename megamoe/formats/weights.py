"""The experts of one rank: their tensors, and what shapes and dtypes they must have."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from megamoe.config import Problem
from megamoe.errors import ArgumentError
from megamoe.formats.quantization import codec


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
                    hint = f" (precision {problem.precision!r}: see ExpertWeights.quantized)"
                raise ArgumentError(f"weights.{name}", None, f"{dtype} {list(shape)}{hint}")
            check_tensor(f"weights.{name}", have[name], shape, dtype, device or self.w13.device)
        for name in have.keys() - expected.keys():
            raise ArgumentError(f"weights.{name}", "given", f"None for {_kind(problem)}")

    def quantized(self, problem: Problem) -> ExpertWeights:
        """Return the problem's weights made from these bf16 ones: themselves where it stores bf16."""
        formulas = codec(problem.formats.w)
        if formulas is None:
            return self
        q13, s13 = formulas.quantize(self.w13, problem.activation.planes)
        q2, s2 = formulas.quantize(self.w2)
        return ExpertWeights(q13, q2, self.b13, self.b2, s13, s2)

    def dense(self, problem: Problem, dtype: torch.dtype) -> ExpertWeights:
        """Return weights without scales: these when they are bf16, else dequantized to `dtype`."""
        formulas = codec(problem.formats.w)
        if self.w13_scale is None or self.w2_scale is None:
            return self
        if formulas is None:
            raise ArgumentError("weights.w13_scale", "given", f"None for {_kind(problem)}")
        w13 = formulas.dequantize(self.w13, self.w13_scale, problem.activation.planes, dtype)
        w2 = formulas.dequantize(self.w2, self.w2_scale, 1, dtype)
        return ExpertWeights(w13, w2, self.b13, self.b2)


def _kind(problem: Problem) -> str:
    return f"precision {problem.precision!r} with bias={problem.bias}"


def expected_weights(problem: Problem) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return name -> (shape, dtype) of every tensor that ExpertWeights must hold."""
    num, planes = problem.num_local_experts(problem.rank), problem.activation.planes
    h, i = problem.hidden, problem.intermediate
    stored = problem.formats.w
    table = {"w13": ((num, planes * i, h), stored.dtype), "w2": ((num, h, i), stored.dtype)}
    if problem.bias:
        table["b13"] = ((num, planes * i), torch.float32)
        table["b2"] = ((num, h), torch.float32)
    if stored.scaled:
        blocks, groups = stored.scale_shape(i, h)
        table["w13_scale"] = ((num, planes * blocks, groups), torch.float32)
        table["w2_scale"] = ((num, *stored.scale_shape(h, i)), torch.float32)
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
