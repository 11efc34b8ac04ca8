"""The experts of one rank: their tensors, and what shapes and dtypes they must have."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from megamoe.core.config import Problem
from megamoe.core.errors import ArgumentError
from megamoe.core.planes import by_plane, check_kind, check_memory, check_strides
from megamoe.formats import mxfp4, nvfp4
from megamoe.formats.fp4 import read_biases
from megamoe.formats.joined import check_joinable, join_pair, join_w1_w3
from megamoe.formats.quantization import codec, transpose_blocks
from megamoe.formats.versions import made_of


@dataclass
class ExpertWeights:
    """The experts of one rank. L local experts, P planes.

    w13: [L, P*I, H] bf16 or e4m3    w13_scale: [L, P*ceil(I/128), ceil(H/128)] fp32, with e4m3 only
    w2:  [L, H, I]   bf16 or e4m3    w2_scale:  [L, ceil(H/128), ceil(I/128)] fp32, with e4m3 only
    b13: [L, P*I] fp32 or None       b2: [L, H] fp32 or None
    Scales by channel, of precision "fp8_channel": w13_scale [L, P*I, 1], w2_scale [L, H, 1].
    MXFP4 and NVFP4, which quantized() makes of bf16, and from_mxfp4() and from_nvfp4() of checkpoints, with planes
    apart: w13 [L, P*I, H/2] and w2 [L, H, I/2] uint8, w13_scale [L, P*ceil(I/128), ceil(H/128), S] and w2_scale
    [L, ceil(H/128), ceil(I/128), S] uint8, S = 528 or, in NVFP4, 1040.

    w13 may be a view [L, P, I, H], and w13 and w2 may have any strides that TMA takes: 1 in the last dimension,
    multiples of 16 bytes before it. The kernel reads them in place, gradients have their layout. Gate and up
    interleaved row by row: `w.unflatten(1, (I, 2)).transpose(1, 2)`; apart: from_w1_w3(). b13 may be [L, P, I], of any
    strides: the kernel is given a copy at each call if it is not contiguous. Not checked, since no shape shows it: that
    gate comes before up in w13, its scales and b13, and that blocks of scales restart at up's first row.
    """

    w13: Tensor
    w2: Tensor
    b13: Tensor | None = None
    b2: Tensor | None = None
    w13_scale: Tensor | None = None
    w2_scale: Tensor | None = None

    @classmethod
    def from_w1_w3(
        cls,
        w1: Tensor,
        w3: Tensor,
        w2: Tensor,
        *,
        biases: tuple[Tensor, Tensor, Tensor] | None = None,
        scales: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> ExpertWeights:
        """Join gate and up projections without a copy; differentiable in all of them. Join anew behind each step.

        w1, w3: [L, I, H], views of one tensor, w3 behind w1: `w1, w3 = torch.empty(2, L, I, H)`, or the halves of a
            [L, 2*I, H]. w2: [L, H, I]. biases: b1 [L, I], b3 [L, I], b2 [L, H]. scales: of w1, w3 and w2, with e4m3.
        Raises ArgumentError for w1 and w3 that no constant distance joins, and for biases or scales of unequal shapes.
        """
        b1, b3, b2 = biases or (None, None, None)
        s1, s3, w2_scale = scales or (None, None, None)
        b13 = join_pair("biases", b1, b3, torch.stack)
        w13_scale = join_pair("scales", s1, s3, torch.cat)
        check_joinable(w1, w3)
        w13 = join_w1_w3(w1, w3)
        made_of(w13, (w1, w3), trains=w1.requires_grad or w3.requires_grad)
        return cls(w13, w2, b13, b2, w13_scale, w2_scale)

    @classmethod
    def from_mxfp4(
        cls,
        w13: Tensor,
        w2: Tensor,
        w13_scale: Tensor,
        w2_scale: Tensor,
        *,
        planes: int = 2,
        interleaved: bool = False,
        biases: tuple[Tensor, Tensor] | None = None,
    ) -> ExpertWeights:
        """Take the MXFP4 experts of a checkpoint; w13 and w2 are not copied, the scales are put into another order.

        w13: [L, P*I, H/2], [L, P, I, H/2] or in blocks [L, P*I, H/32, 16]; w2: [L, H, I/2] or [L, H, I/32, 16]. A byte
            is two e2m1, the lower nibble the first.
        w13_scale: [L, P*I, H/32] or [L, P, I, H/32]; w2_scale: [L, H, I/32]. E8M0, the exponent plus 127.
        interleaved: gate and up rows alternate, as GPT-OSS has them: `*_blocks` and `*_scales` as they are.
        biases: b13 [L, P*I], in the order of w13's rows, and b2 [L, H], of any float type.
        Waits for the device. Raises ArgumentError for other shapes or dtypes, NaN scales and those above 2^125.
        """
        planes13, s13 = mxfp4.from_checkpoint("w13", w13, w13_scale, planes, interleaved)
        planes2, s2 = mxfp4.from_checkpoint("w2", w2, w2_scale, 1, False)
        w13 = by_plane(planes13, planes)  # scales fit these planes alone, and layers look at them
        return cls(w13, planes2, *read_biases(biases, planes, interleaved), s13, s2)

    @classmethod
    def from_nvfp4(
        cls,
        w13: Tensor,
        w2: Tensor,
        scales: tuple[Tensor, Tensor],
        outer: tuple[Tensor, Tensor],
        *,
        inverse: bool = False,
        planes: int = 2,
        interleaved: bool = False,
        biases: tuple[Tensor, Tensor] | None = None,
    ) -> ExpertWeights:
        """Take the NVFP4 experts of a checkpoint; w13 and w2 are not copied, the scales are put into another order.

        w13: [L, P*I, H/2] or [L, P, I, H/2]; w2: [L, H, I/2]. A byte is two e2m1, the lower nibble the first.
        scales: of w13 [L, P*I, H/16] or [L, P, I, H/16], of w2 [L, H, I/16]; e4m3 or its bytes, with any sign.
        outer: of w13 [L], or [L, P] for gate and up apart, of w2 [L]; fp32. ModelOpt's weight_scale_2.
        inverse: numbers are divided by them, as by compressed-tensors' weight_global_scale.
        interleaved, biases: as from_mxfp4().
        Waits for the device. Products with an outer scale of 0 are 0. Raises ArgumentError for other shapes or dtypes,
        NaN scales, and outer scales that are negative or not finite.
        """
        for name, pair in (("scales", scales), ("outer", outer)):
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                raise ArgumentError(name, type(pair).__name__, "a pair: of w13, of w2")
        made = [
            nvfp4.from_checkpoint(
                *(name, w, scale, of_matrix), planes=p, interleaved=turned, inverse=inverse
            )
            for name, w, scale, of_matrix, p, turned in (
                ("w13", w13, scales[0], outer[0], planes, interleaved),
                ("w2", w2, scales[1], outer[1], 1, False),
            )
        ]
        (w13, s13), (w2, s2) = made
        w13 = by_plane(w13, planes)  # scales fit these planes alone, and layers look at them
        return cls(w13, w2, *read_biases(biases, planes, interleaved), s13, s2)

    def with_flat_bias(self) -> ExpertWeights:
        """Return weights whose b13 is contiguous, as the kernel reads it: these, or with a copy of b13."""
        if self.b13 is None or self.b13.is_contiguous():
            return self
        return replace(self, b13=self.b13.contiguous())

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
            device = device or self.w13.device
            if name in STRIDED:
                _check_strided(f"weights.{name}", have[name], shape, dtype, device, problem)
            else:
                check_tensor(f"weights.{name}", have[name], shape, dtype, device)
        for name in have.keys() - expected.keys():
            raise ArgumentError(f"weights.{name}", "given", f"None for {_kind(problem)}")

    def quantized(self, problem: Problem) -> ExpertWeights:
        """Return the problem's weights made from these bf16 ones: themselves where it stores bf16.

        Raises ArgumentError for w13 and w2 that do not fit the problem.
        """
        formulas = codec(problem.formats.w)
        if formulas is None:
            return self
        self._check_matrices(replace(problem, precision="bf16"))
        q13, s13 = formulas.quantize(self.w13, problem.activation.planes)
        q2, s2 = formulas.quantize(self.w2)
        return ExpertWeights(q13, q2, self.b13, self.b2, s13, s2)

    def dense(self, problem: Problem, dtype: torch.dtype) -> ExpertWeights:
        """Return weights without scales: these when they are bf16, else dequantized to `dtype`.

        Raises ArgumentError for w13 and w2 that do not fit the problem.
        """
        formulas = codec(problem.formats.w)
        if self.w13_scale is None or self.w2_scale is None:
            return self
        if formulas is None:
            raise ArgumentError("weights.w13_scale", "given", f"None for {_kind(problem)}")
        self._check_matrices(problem)
        w13 = formulas.dequantize(self.w13, self.w13_scale, problem.activation.planes, dtype)
        w2 = formulas.dequantize(self.w2, self.w2_scale, 1, dtype)
        return ExpertWeights(w13, w2, self.b13, self.b2)

    def _check_matrices(self, problem: Problem) -> None:
        """Raise ArgumentError for w13 and w2 of other sizes than the problem's, whatever their number of experts.

        Copies have no planes of their own: what is by plane here, of another number, would fit layers afterwards.
        """
        table = expected_weights(problem)
        for name, planes in (("w13", problem.activation.planes), ("w2", 1)):
            (_, rows, width), _ = table[name]
            found, apart = list(getattr(self, name).shape), [planes, rows // planes, width]
            if found[1:] not in ([rows, width], apart):
                expected = f"[L, {rows}, {width}] or [L, {', '.join(map(str, apart))}]"
                raise ArgumentError(f"weights.{name}.shape", found, expected)


@dataclass(frozen=True)
class TurnedWeights:
    """What the backward pass of a layer with e4m3 weights multiplies; make them with `of`.

    forward: as forward has them. The others are their transposes, K-major for dy w2 and dgu w13, the only order in
    which tensor cores take e4m3; numbers and scales are the same.
    w13: [L, P, H, I] e4m3    w13_scale: [L, ceil(H/128), P*ceil(I/128)] fp32
    w2:  [L, 1, I, H] e4m3    w2_scale:  [L, ceil(I/128), ceil(H/128)] fp32
    """

    forward: ExpertWeights
    w13: Tensor
    w2: Tensor
    w13_scale: Tensor
    w2_scale: Tensor

    @classmethod
    def of(cls, problem: Problem, weights: ExpertWeights) -> TurnedWeights:
        """Turn e4m3 weights around. Raises ArgumentError for weights without scales."""
        if weights.w13_scale is None or weights.w2_scale is None:
            raise ArgumentError("weights.w13_scale", None, "e4m3 weights, with scales")
        w13, s13 = transpose_blocks(weights.w13, weights.w13_scale, problem.activation.planes)
        w2, s2 = transpose_blocks(weights.w2, weights.w2_scale)
        return cls(weights, w13, w2, s13, s2)

    def named(self) -> dict[str, Tensor]:
        """Return the transposes by name."""
        return {n: getattr(self, n) for n in ("w13", "w2", "w13_scale", "w2_scale")}

    def validate(self, problem: Problem, device: torch.device) -> None:
        """Raise ArgumentError unless every tensor fits the problem and lies on `device`."""
        self.forward.validate(problem, device)
        num, planes = problem.num_local_experts(problem.rank), problem.activation.planes
        h, i, stored = problem.hidden, problem.intermediate, problem.formats.w
        wide, high = stored.scale_shape(h, i)
        shapes = {
            "w13": ((num, planes, h, i), stored.dtype),
            "w2": ((num, 1, i, h), stored.dtype),
            "w13_scale": ((num, wide, planes * high), torch.float32),
            "w2_scale": ((num, high, wide), torch.float32),
        }
        for name, (shape, dtype) in shapes.items():
            check_tensor(f"turned.{name}", getattr(self, name), shape, dtype, device)


def _kind(problem: Problem) -> str:
    return f"precision {problem.precision!r} with bias={problem.bias}"


def expected_weights(problem: Problem) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return name -> (shape, dtype) of every tensor that ExpertWeights must hold."""
    num, planes = problem.num_local_experts(problem.rank), problem.activation.planes
    h, i = problem.hidden, problem.intermediate
    stored = problem.formats.w
    table: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "w13": ((num, planes * i, stored.width(h)), stored.dtype),
        "w2": ((num, h, stored.width(i)), stored.dtype),
    }
    if problem.bias:
        table["b13"] = ((num, planes * i), torch.float32)
        table["b2"] = ((num, h), torch.float32)
    if stored.scaled:
        blocks, *further = stored.scale_shape(i, h)
        table["w13_scale"] = ((num, planes * blocks, *further), stored.scale_dtype)
        table["w2_scale"] = ((num, *stored.scale_shape(h, i)), stored.scale_dtype)
    return table


STRIDED = ("w13", "w2", "b13")  # need not be contiguous


def _check_strided(
    name: str,
    value: object,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    problem: Problem,
) -> None:
    """Do what check_tensor does, for tensors that may be strided, w13 and b13 also split into planes."""
    planes = problem.activation.planes
    num, rows, *width = shape
    apart = (num, planes, rows // planes, *width)
    if not name.endswith("w2") and isinstance(value, Tensor) and value.dim() == len(apart):
        shape = apart
    check_tensor(name, value, shape, dtype, device, contiguous=False)
    if width and isinstance(value, Tensor):
        check_strides(name, value)


def check_tensor(
    name: str,
    value: object,
    shape: tuple[int, ...],
    dtype: torch.dtype | tuple[torch.dtype, ...],
    device: torch.device,
    *,
    contiguous: bool = True,
) -> None:
    """Raise ArgumentError unless `value` is a (contiguous) tensor of this shape, dtype and device."""
    if not isinstance(value, Tensor):
        raise ArgumentError(name, type(value).__name__, "a tensor")
    check_kind(name, value)
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    if value.dtype not in dtypes:
        raise ArgumentError(f"{name}.dtype", value.dtype, " or ".join(map(str, dtypes)))
    if tuple(value.shape) != shape:
        raise ArgumentError(f"{name}.shape", list(value.shape), str(list(shape)))
    # The kernel would read the numbers before their sign is changed.
    if not torch.compiler.is_compiling() and value.is_neg():
        raise ArgumentError(
            name, "a negative view", "a tensor as it lies in memory: .resolve_neg()"
        )
    if value.device != device:
        raise ArgumentError(f"{name}.device", value.device, f"{device}, where the others are")
    if contiguous and not value.is_contiguous():
        raise ArgumentError(f"{name}.stride()", value.stride(), "contiguous, row-major")
    check_memory(name, value)
