"""Define `ExpertWeights`, the experts of one rank, and the shapes and dtypes that its tensors must have."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

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
    """Hold the weights of the experts of one rank. L is the number of local experts, P the number of planes.

    `w13` is gate and up projection in one tensor: gate rows, then up rows. It may be [L, P*I, H] or [L, P, I, H], and
    `w13` and `w2` may have any strides that TMA can read: 1 in the last dimension, multiples of 16 bytes before it. The
    kernel reads them in place, and gradients have the same layout. If gate and up rows alternate, pass `w.unflatten(1,
    (I, 2)).transpose(1, 2)`. If they are two tensors, call from_w1_w3().

    No shape shows the order of gate and up, so it is not checked: in `w13`, `w13_scale` and `b13` gate comes first, and
    the blocks of scales restart at the first row of up.

    Args:
        w13: [L, P*I, H] or [L, P, I, H], bf16 or e4m3. Masters of quantized weights may be fp32. FP4: H/2 in place of
            H, uint8.
        w2: [L, H, I], as w13. FP4: I/2 in place of I, uint8.
        b13: [L, P*I] or [L, P, I] fp32, any strides (copied in every call unless contiguous). Default: no biases.
        b2: [L, H] fp32. Default: no biases.
        w13_scale: fp32 [L, P*ceil(I/128), ceil(H/128)], with "fp8_channel" [L, P*I, 1]. FP4: uint8 [L, P*ceil(I/128),
            ceil(H/128), S], where S is 528 for MXFP4 and 1040 for NVFP4. Default: None, for bf16.
        w2_scale: fp32 [L, ceil(H/128), ceil(I/128)], with "fp8_channel" [L, H, 1]. FP4: uint8 [L, ceil(H/128),
            ceil(I/128), S]. Default: None, for bf16.
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
        """Join gate and up projections without a copy; differentiable. Call it again after each optimizer step.

        Args:
            w1: Gate projection [L, I, H].
            w3: Up projection [L, I, H], after w1 in the same storage, as in `w1, w3 = torch.empty(2, L, I, H)` or the
                halves of one [L, 2*I, H].
            w2: Down projection [L, H, I].
            biases: b1 [L, I], b3 [L, I] and b2 [L, H]. Default: no biases.
            scales: Scales of w1, w3 and w2, for e4m3 weights. Default: None.

        Returns:
            ExpertWeights whose w13 is a view.

        Raises:
            ArgumentError: w1 and w3 are not views of one tensor at one constant distance, or biases or scales have
                different shapes.
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
        """Wrap the MXFP4 experts of a checkpoint. Only the scales are copied, into the kernel's order.

        Each byte of w13 and w2 holds two e2m1 numbers, the first in the lower nibble. A scale is E8M0: the exponent
        plus 127 (OCP Microscaling Formats 1.0). This call waits for the device.

        Args:
            w13: [L, P*I, H/2], [L, P, I, H/2] or in blocks [L, P*I, H/32, 16].
            w2: [L, H, I/2] or [L, H, I/32, 16].
            w13_scale: [L, P*I, H/32] or [L, P, I, H/32].
            w2_scale: [L, H, I/32].
            planes: P, 2 for gated activations, else 1. Default: 2.
            interleaved: True if gate and up rows alternate, as in GPT-OSS. Default: False.
            biases: b13 [L, P*I] in the row order of w13, and b2 [L, H], of any float type. Default: no biases.

        Returns:
            ExpertWeights whose w13 and w2 are views.

        Raises:
            ArgumentError: A shape or dtype is wrong, or a scale is NaN or above 2^125.
        """
        w13, s13 = mxfp4.from_checkpoint("w13", w13, w13_scale, planes, interleaved)
        w2, s2 = mxfp4.from_checkpoint("w2", w2, w2_scale)
        w13 = by_plane(w13, planes)  # scales fit these planes alone, and layers look at them
        return cls(w13, w2, *read_biases(biases, planes, interleaved), s13, s2)

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
        """Wrap the NVFP4 experts of a checkpoint. Only the scales are copied, into the kernel's order.

        Each byte of w13 and w2 holds two e2m1 numbers, the first in the lower nibble. This call waits for the device.

        Args:
            w13: [L, P*I, H/2] or [L, P, I, H/2].
            w2: [L, H, I/2].
            scales: One e4m3 (or its byte) per 16 numbers: of w13 [L, P*I, H/16] or [L, P, I, H/16], of w2 [L, H, I/16].
            outer: One fp32 scale per matrix, ModelOpt's `weight_scale_2`: of w13 [L], or [L, P] if gate and up differ,
                of w2 [L]. If it is 0, products are 0.
            inverse: True if numbers are divided by `outer`, as with `weight_global_scale` of compressed-tensors.
                Default: False.
            planes: P, 2 for gated activations, else 1. Default: 2.
            interleaved: True if gate and up rows alternate. Default: False.
            biases: b13 [L, P*I] in the row order of w13, and b2 [L, H], of any float type. Default: no biases.

        Returns:
            ExpertWeights whose w13 and w2 are views.

        Raises:
            ArgumentError: A shape or dtype is wrong, a scale is NaN, or an outer scale is negative or not finite.
        """
        for name, pair in (("scales", scales), ("outer", outer)):
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                raise ArgumentError(name, type(pair).__name__, "a pair: of w13, of w2")
        lies: Any = {"planes": planes, "interleaved": interleaved}
        w13, s13 = nvfp4.from_checkpoint("w13", w13, scales[0], outer[0], inverse=inverse, **lies)
        w2, s2 = nvfp4.from_checkpoint("w2", w2, scales[1], outer[1], inverse=inverse)
        w13 = by_plane(w13, planes)  # scales fit these planes alone, and layers look at them
        return cls(w13, w2, *read_biases(biases, planes, interleaved), s13, s2)

    def with_flat_bias(self) -> ExpertWeights:
        """Return weights whose b13 is contiguous, as the kernel needs it. This copies b13 only if necessary."""
        if self.b13 is None or self.b13.is_contiguous():
            return self
        return replace(self, b13=self.b13.contiguous())

    def named(self) -> dict[str, Tensor]:
        """Return the tensors that are not None, by name."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def validate(
        self, problem: Problem, device: torch.device | None = None, masters: bool = False
    ) -> None:
        """Validate every tensor against a problem.

        Args:
            problem: The layer.
            device: Where the tensors must be. Default: the device of w13.
            masters: True: also accept masters of weights that the problem stores with scales. Default: False.

        Raises:
            ArgumentError: A tensor is missing or unexpected, or has a wrong shape, dtype, stride or device.
        """
        have = self.named()
        wide = masters_of(problem, self.w13) if masters else None
        expected: dict[str, tuple[tuple[int, ...], Any]] = {**expected_weights(problem, wide)}
        if wide is not None:
            expected["w13"] = expected["w13"][0], MASTERS  # w2 has the same one
        for name, (shape, dtype) in expected.items():
            if name not in have:
                hint = ""
                if name.endswith("_scale"):
                    hint = f" (precision {problem.precision!r}: see ExpertWeights.quantized)"
                raise ArgumentError(f"weights.{name}", None, f"{dtype} {list(shape)}{hint}")
            value, device = have[name], device or self.w13.device
            if name in ("w13", "b13") and isinstance(value, Tensor) and value.dim() > len(shape):
                planes = problem.activation.planes  # apart
                shape = shape[0], planes, shape[1] // planes, *shape[2:]
            contiguous = name not in ("w13", "w2", "b13")
            check_tensor(f"weights.{name}", value, shape, dtype, device, contiguous=contiguous)
            if name in ("w13", "w2"):
                check_strides(f"weights.{name}", value)
        for name in have.keys() - expected.keys():
            raise ArgumentError(f"weights.{name}", "given", f"None for {_kind(problem)}")

    def quantized(self, problem: Problem) -> ExpertWeights:
        """Quantize bf16 or fp32 weights to the problem's precision (docs/numerics.md, "Quantization").

        Args:
            problem: The layer, with any number of experts.

        Returns:
            New ExpertWeights; this object if the precision stores bf16.

        Raises:
            ArgumentError: w13 or w2 does not fit the problem.
        """
        formulas = codec(problem.formats.w)
        if formulas is None:
            return self
        self._check_matrices(replace(problem, precision="bf16"))
        q13, s13 = formulas.quantize(self.w13, problem.activation.planes)
        q2, s2 = formulas.quantize(self.w2)
        return ExpertWeights(q13, q2, self.b13, self.b2, s13, s2)

    def dense(self, problem: Problem, dtype: torch.dtype) -> ExpertWeights:
        """Dequantize the weights.

        Args:
            problem: The layer, with any number of experts.
            dtype: Float type of the result.

        Returns:
            New ExpertWeights without scales; this object if the weights have none.

        Raises:
            ArgumentError: w13 or w2 does not fit the problem.
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
        """Raise ArgumentError unless w13 and w2 have the problem's sizes, with any number of experts.

        A quantized copy has no planes of its own. A w13 with another number of planes would pass later checks by
        mistake.
        """
        table = expected_weights(problem)
        for name, planes in (("w13", problem.activation.planes), ("w2", 1)):
            (_, rows, width), _ = table[name]
            found, apart = list(getattr(self, name).shape), [planes, rows // planes, width]
            if found[1:] not in ([rows, width], apart):
                expected = f"[L, {rows}, {width}] or [L, {', '.join(map(str, apart))}]"
                raise ArgumentError(f"weights.{name}.shape", found, expected)


@dataclass(frozen=True)
class TransposedWeights:
    """Hold e4m3 weights and their transposes, which the backward pass multiplies; create it with `of`.

    Tensor cores take e4m3 operands only K-major, so dy w2 and dgu w13 need transposed copies. Numbers and scales are
    the same.

    Args:
        forward: The weights of the forward pass.
        w13: [L, P, H, I] e4m3.
        w2: [L, 1, I, H] e4m3.
        w13_scale: [L, ceil(H/128), P*ceil(I/128)] fp32.
        w2_scale: [L, ceil(I/128), ceil(H/128)] fp32.
    """

    forward: ExpertWeights
    w13: Tensor
    w2: Tensor
    w13_scale: Tensor
    w2_scale: Tensor

    @classmethod
    def of(cls, problem: Problem, weights: ExpertWeights) -> TransposedWeights:
        """Transpose e4m3 weights. Raise ArgumentError for weights without scales."""
        if weights.w13_scale is None or weights.w2_scale is None:
            raise ArgumentError("weights.w13_scale", None, "e4m3 weights, with scales")
        w13, s13 = transpose_blocks(weights.w13, weights.w13_scale, problem.activation.planes)
        w2, s2 = transpose_blocks(weights.w2, weights.w2_scale)
        return cls(weights, w13, w2, s13, s2)

    def named(self) -> dict[str, Tensor]:
        """Return the transposes by name."""
        return {n: getattr(self, n) for n in ("w13", "w2", "w13_scale", "w2_scale")}

    def validate(self, problem: Problem, device: torch.device) -> None:
        """Raise ArgumentError unless every tensor fits the problem and is on `device`."""
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
            check_tensor(f"transposed.{name}", getattr(self, name), shape, dtype, device)


def _kind(problem: Problem) -> str:
    return f"precision {problem.precision!r} with bias={problem.bias}"


MASTERS = torch.bfloat16, torch.float32
BF16_MASTERS = MASTERS[:1]


def master_types(problem: Problem) -> tuple[torch.dtype, ...]:
    """Return the dtypes that masters may have: fp32 too where the precision quantizes them."""
    return MASTERS if problem.formats.w.scaled else BF16_MASTERS


def masters_of(problem: Problem, w13: Tensor) -> torch.dtype | None:
    """Return the dtype that masters like w13 must have; None for weights in the problem's own format."""
    if not (problem.formats.w.scaled and w13.dtype.itemsize > 1):
        return None
    return w13.dtype if w13.dtype in MASTERS else MASTERS[0]


def expected_weights(
    problem: Problem, masters: torch.dtype | None = None
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return name -> (shape, dtype) of every tensor that ExpertWeights must have. masters: of masters in this dtype."""
    if masters is not None:
        problem = replace(problem, precision="bf16")
    num, planes = problem.num_local_experts(problem.rank), problem.activation.planes
    h, i = problem.hidden, problem.intermediate
    stored = problem.formats.w
    table: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "w13": ((num, planes * i, stored.width(h)), masters or stored.dtype),
        "w2": ((num, h, stored.width(i)), masters or stored.dtype),
    }
    if problem.bias:
        table["b13"] = ((num, planes * i), torch.float32)
        table["b2"] = ((num, h), torch.float32)
    if stored.scaled:
        blocks, *further = stored.scale_shape(i, h)
        table["w13_scale"] = ((num, planes * blocks, *further), stored.scale_dtype)
        table["w2_scale"] = ((num, *stored.scale_shape(h, i)), stored.scale_dtype)
    return table


def check_experts(name: str, value: object) -> None:
    """Raise ArgumentError unless `value` is an ExpertWeights with a w13."""
    if not isinstance(value, ExpertWeights):
        raise ArgumentError(name, type(value).__name__, "ExpertWeights")
    if not isinstance(value.w13, Tensor):
        raise ArgumentError(f"{name}.w13", type(value.w13).__name__, "a tensor")


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
            name, "a negative view", "a tensor without a pending negation: call .resolve_neg()"
        )
    if value.device != device:
        raise ArgumentError(f"{name}.device", value.device, f"{device}, as the others have")
    if contiguous and not value.is_contiguous():
        raise ArgumentError(f"{name}.stride()", value.stride(), "contiguous, row-major")
    check_memory(name, value)
