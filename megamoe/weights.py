"""The experts of one rank: their tensors, block quantization to FP8, and the cached copies.

The formula is docs/architecture.md, "Quantization": amax = max(max|v|, 1e-10), scale = amax / 448,
q = e4m3(clamp(v * (448 / amax), -448, 448)), value = q * scale; fp32, exactly these two divisions.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import lru_cache

import torch
from torch import Tensor

from megamoe.config import Problem
from megamoe.errors import ArgumentError, CompileError

log = logging.getLogger("megamoe")

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
MIN_AMAX = 1e-10
GROUP = 128


def num_groups(width: int) -> int:
    """Return S = ceil(width / 128)."""
    return -(-width // GROUP)


def _quantize(v: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """v: fp32, one group along `dims` -> (e4m3 of the same shape, scale with `dims` kept as 1)."""
    amax = v.abs().amax(dim=dims, keepdim=True).clamp(min=MIN_AMAX)
    # Tensor over tensor: torch computes scalar / tensor as reciprocal * scalar, and on CUDA tensor / scalar as
    # tensor * (1 / scalar), one ulp away from the kernel's division.
    limit = torch.full_like(amax, E4M3_MAX)
    # The clamp matters: torch <= 2.11 turns values past 448 into NaN.
    q = (v * (limit / amax)).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)
    return q, amax / limit


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x: [..., K] -> (q [..., K] e4m3, scale [..., ceil(K/128)] fp32); groups of 1x128."""
    width, groups = x.shape[-1], num_groups(x.shape[-1])
    v = torch.nn.functional.pad(x.float(), (0, groups * GROUP - width))
    q, scale = _quantize(v.unflatten(-1, (groups, GROUP)), dims=(-1,))
    return q.flatten(-2)[..., :width].contiguous(), scale.squeeze(-1)


def dequantize_rows(q: Tensor, scale: Tensor) -> Tensor:
    """q: [..., K] e4m3, scale: [..., ceil(K/128)] -> [..., K] fp32."""
    return q.float() * scale.repeat_interleave(GROUP, dim=-1)[..., : q.shape[-1]]


def _pad_planes(w: Tensor, planes: int) -> Tensor:
    """w: [P*I, K] -> fp32 [P, ceil(I/128), 128, ceil(K/128), 128], zero padded."""
    rows, width = w.shape[0] // planes, w.shape[1]
    n, k = num_groups(rows), num_groups(width)
    v = w.float().reshape(planes, rows, width)
    v = torch.nn.functional.pad(v, (0, k * GROUP - width, 0, n * GROUP - rows))
    return v.reshape(planes, n, GROUP, k, GROUP)


def quantize_blockwise(
    w: Tensor, planes: int = 1, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Quantize weights in blocks of 128x128 that restart at each plane.

    w: [L, P*I, K] -> (q [L, P*I, K] e4m3, scale [L, P*ceil(I/128), ceil(K/128)] fp32).
    planes: 2 for the w13 of a gated activation (gate rows, then up rows), else 1.
    out: (q, scale) to write into.
    """
    num, height, width = w.shape
    if height % planes:
        raise ArgumentError("w.shape[1]", height, f"a multiple of planes = {planes}")
    rows = height // planes
    scale_shape = (num, planes * num_groups(rows), num_groups(width))
    if out is None:
        q = torch.empty(w.shape, dtype=E4M3, device=w.device)
        scale = torch.empty(scale_shape, dtype=torch.float32, device=w.device)
    else:
        q, scale = out
    for expert in range(num):  # one by one: the padded fp32 copy of all experts would be large
        q_e, scale_e = _quantize(_pad_planes(w[expert].detach(), planes), dims=(2, 4))
        q_e = q_e.reshape(planes, num_groups(rows) * GROUP, -1)
        q[expert] = q_e[:, :rows, :width].reshape(height, width)
        scale[expert] = scale_e.reshape(scale_shape[1:])
    return q, scale


def dequantize_blockwise(
    q: Tensor, scale: Tensor, planes: int = 1, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Invert quantize_blockwise: -> [L, P*I, K], computed in fp32, rounded to `dtype`."""
    num, height, width = q.shape
    rows = height // planes
    out = torch.empty(q.shape, dtype=dtype, device=q.device)
    for expert in range(num):
        s = scale[expert].reshape(planes, -1, scale.shape[-1])
        s = s.repeat_interleave(GROUP, dim=1)[:, :rows]
        s = s.repeat_interleave(GROUP, dim=2)[:, :, :width]
        out[expert] = q[expert].float() * s.reshape(height, width)
    return out


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
                    hint = ' (precision "fp8": see megamoe.weights.quantize_blockwise)'
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


@lru_cache(maxsize=1)
def _fused_quantizer() -> Callable[..., tuple[Tensor, Tensor]] | None:
    """Return the kernel that quantizes in one pass over memory, if it can be compiled here."""
    try:
        module = importlib.import_module("megamoe.jit.quantize")
        module.compile_quantize()
    except (ImportError, CompileError) as error:
        log.warning("weights are quantized by torch operations, not by one kernel: %s", error)
        return None
    fused: Callable[..., tuple[Tensor, Tensor]] = module.quantize_weights
    return fused


def _quantize_weights(
    w: Tensor, planes: int, out: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """Quantize by the fused kernel on Hopper where there is one, else by torch; the same bits."""
    on_hopper = w.is_cuda and torch.cuda.get_device_capability(w.device)[0] == 9
    if on_hopper and w.numel() and (fused := _fused_quantizer()) is not None:
        return fused(w, planes, out=out)
    return quantize_blockwise(w, planes, out=out)


class QuantizedCache:
    """FP8 copies of bf16 parameters, made once per parameter version and refreshed in place.

    A version is (address, tensor._version): an optimizer's in-place step makes a new one. Writes
    that bypass the counter (through `.data`, or FSDP2's all-gather) do not: call invalidate() after
    them. The entry keeps the source's storage alive, so that an address cannot come back with other
    contents.
    """

    def __init__(self) -> None:
        self._entries: dict[str, tuple[Tensor, tuple[int, int], Tensor, Tensor]] = {}

    def get(self, name: str, w: Tensor, planes: int = 1) -> tuple[Tensor, Tensor]:
        """Return (q, scale) of w; the same storage on every call with the same name and shape."""
        version = (w.data_ptr(), -1 if w.is_inference() else w._version)
        entry = self._entries.get(name)
        if entry is not None and entry[1] == version and entry[0].shape == w.shape:
            return entry[2], entry[3]
        with torch.no_grad():
            out = None
            if entry is not None and (entry[2].shape, entry[2].device) == (w.shape, w.device):
                out = entry[2], entry[3]
            q, scale = _quantize_weights(w.detach(), planes, out)
        self._entries[name] = (w.detach(), version, q, scale)
        return q, scale

    def weights(self, problem: Problem, masters: ExpertWeights) -> ExpertWeights:
        """Return the FP8 weights of bf16 masters; biases are handed through."""
        q13, s13 = self.get("w13", masters.w13, problem.activation.planes)
        q2, s2 = self.get("w2", masters.w2)
        return ExpertWeights(q13, q2, masters.b13, masters.b2, s13, s2)

    def invalidate(self) -> None:
        """Forget all versions; the next get() quantizes again, into the same storage."""
        self._entries = {
            name: (w, (0, -2), q, scale) for name, (w, _, q, scale) in self._entries.items()
        }
