"""Run CUDA kernels of one pass over memory: FP8 quantization of weights and rows, MXFP4 to bf16, and sums of rows.

Sources: csrc/megamoe/kernels/quantize_weights.cuh, dequantize_mxfp4.cuh and sum_rows.cuh.
"""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from megamoe.core.errors import ArgumentError
from megamoe.core.planes import by_plane, check_strides
from megamoe.core.table import E4M3_BLOCKS, SCALE_GROUP
from megamoe.formats.quantization import new_transposes, stored_shape
from megamoe.jit import abi
from megamoe.jit.compiler import CompileResult, compile_source
from megamoe.jit.module import Block, Kernel, Launcher
from megamoe.jit.recording import launch, made
from megamoe.jit.source import QUANTIZE, QUANTIZE_SOURCE

_STRUCTURES, _ = abi.parse(abi.read_text("layout/passes.h"))
_Args, _RowsArgs, _TailsArgs, _SumArgs, _Mxfp4Args = (
    _STRUCTURES[f"{name}Args"]
    for name in ("QuantizeWeights", "QuantizeRows", "CopyTails", "SumRows", "DequantizeMxfp4")
)


def compile_quantize() -> CompileResult:
    """Compile the kernels, or take it as prebuilt or from the cache. Needs no GPU."""
    return compile_source(QUANTIZE_SOURCE, name=f"{QUANTIZE}.cu")


@lru_cache(maxsize=16)
def _kernel(device: int, entry: str) -> Kernel:
    return Kernel(compile_quantize().cubin, f"megamoe_{entry}", device)


def _launch(entry: str, device: torch.device, grid: tuple[int, int, int], args: Any) -> None:
    pointers = [abi.pointer(args, at) for at in _pointer_offsets(args.__class__)]

    def fill() -> Block:
        kernel = _kernel(torch.cuda.current_device(), entry)
        places = [(i, field, None) for i, field in enumerate(pointers)]
        return Block(Launcher(kernel, grid, args, cooperative=False), places, len(places))

    with torch.cuda.device(device):
        stream = torch._C._cuda_getCurrentRawStream(torch.cuda.current_device())
        launch(fill, [field.value for field in pointers], stream)


@cache
def _pointer_offsets(structure: Any) -> list[int]:
    found: list[int] = []
    for name, of in structure._fields_:
        if of is ctypes.c_void_p or getattr(of, "_type_", None) is ctypes.c_void_p:
            first = getattr(structure, name).offset
            found += range(first, first + ctypes.sizeof(of), 8)
    return found


Pair = tuple[Tensor, Tensor]
Ends = tuple[Tensor | None, int, int]  # of each expert's rows, how many, the experts' alignment
_ENTRIES = {torch.bfloat16: "quantize_weights", torch.float32: "quantize_fp32_weights"}


def quantize_weights(
    w: Tensor,
    planes: int = 1,
    out: Pair | None = None,
    transposed: bool = False,
    transposed_out: Pair | None = None,
) -> tuple[Pair, Pair | None]:
    """w: [L, P*I, H] or [L, P, I, H] bf16 or fp32 on CUDA, as TMA takes it -> (q, scale), their transposes or None.

    q: [L, P*I, H] e4m3, scale: [L, P*ceil(I/128), ceil(H/128)] fp32. transposed: make transposes, see
    quantization.transpose_blocks; I is a multiple of 16. out, transposed_out: where to put them. Runs on the current
    stream; the same bits as quantization.quantize_blockwise. Raises ArgumentError for what it cannot read.
    """
    if w.dtype not in _ENTRIES or w.dim() not in (3, 4) or not w.is_cuda:
        value = f"{w.dtype} {list(w.shape)} on {w.device}"
        raise ArgumentError("w", value, "bf16 or fp32 on CUDA")
    check_strides("w", w)
    num, height, columns = stored_shape(w)
    if out is None:
        scales = num, planes * -(-(height // planes) // 128), -(-columns // 128)
        q = torch.empty((num, height, columns), dtype=E4M3_BLOCKS.dtype, device=w.device)
        out = made(q), made(torch.empty(scales, dtype=torch.float32, device=w.device))
    if transposed and transposed_out is None:
        transposed_out = tuple(map(made, new_transposes(*out, planes)))
    transposed_out = transposed_out if transposed else None
    _launch_weights(_ENTRIES[w.dtype], w, planes, out, transposed_out)
    return out, transposed_out


def transpose_weights(q: Tensor, scale: Tensor, planes: int, out: Pair | None = None) -> Pair:
    """Do as quantization.transpose_blocks(), on the current stream; q: on CUDA, I a multiple of 16."""
    out = new_transposes(q, scale, planes) if out is None else out
    _launch_weights("transpose_weights", q, planes, (q, scale), out)
    return out


def _launch_weights(entry: str, w: Tensor, planes: int, pair: Pair, turned: Pair | None) -> None:
    num, height, columns = stored_shape(w)
    rows, turns = height // planes, turned is not None
    if height % planes or columns % 8 or w.data_ptr() % 16 or (turns and rows % 16):
        of_rows = "I, a multiple of 16" if turns else "I"
        raise ArgumentError(
            "w.shape", list(w.shape), f"[L, {planes} * {of_rows}, multiple of 8], 16-byte aligned"
        )
    if w.numel():
        places = [t.data_ptr() for t in (w, *pair, *(turned or ()))]
        strides = by_plane(w, planes).stride()[:3]
        args = _Args(*places, *[0] * (5 - len(places)), *strides, planes, rows, columns)
        _launch(entry, w.device, (-(-columns // 128), planes * -(-rows // 128), num), args)


def quantize_rows(x: Tensor, ends: Ends | None = None, places: int = 0) -> Pair:
    """x: [M, H] bf16 on CUDA, contiguous, 16-byte aligned, H a multiple of 8 -> (q [M, H] e4m3, scale [M, S] fp32).

    ends, places: put the scales [S, places] where grouped kernels read them, zeros between (megamoe/ops/scales.py).
    Runs on the current stream; the same bits as quantization.quantize_rows.
    """
    groups = -(-x.shape[1] // SCALE_GROUP)
    q = made(torch.empty(x.shape, dtype=E4M3_BLOCKS.dtype, device=x.device))
    if ends is None:
        scale = made(torch.empty((len(x), groups), dtype=torch.float32, device=x.device))
        _launch_rows("quantize_rows", x, q, scale)
        return q, scale
    scale = made(torch.empty((groups, places), dtype=torch.float32, device=x.device))
    by_block: Any = {"places": places, "num_experts": ends[1], "alignment": ends[2]}
    by_block["ends"] = None if ends[0] is None else ends[0].data_ptr()
    _launch_rows("quantize_rows", x, q, scale, **by_block)
    return q, scale


def copy_tails(a: Tensor, b: Tensor, ends: Ends) -> Pair:
    """a: [M, N1], b: [M, N2] bf16 on CUDA, as TMA takes them -> as megamoe/ops/groups.py has them. Current stream."""
    offs, num, alignment = ends
    out = tuple(made(t.new_empty(num * 64, t.shape[1])) for t in (a, b))
    args = _TailsArgs(rows=len(a), alignment=alignment)
    args.ends = None if offs is None else offs.data_ptr()
    for i, (t, copy) in enumerate(zip((a, b), out, strict=True)):
        args.x[i], args.out[i] = t.data_ptr(), copy.data_ptr()
        args.row_stride[i], args.columns[i] = t.stride(0), t.shape[1]
    _launch("copy_tails", a.device, (num, -(-max(args.columns) // 256), 2), args)
    return out


def dequantize_rows(q: Tensor, scale: Tensor) -> Tensor:
    """q: [M, H] e4m3 on CUDA, scale: [M, S] fp32, both contiguous and as quantize_rows() has them -> [M, H] bf16.

    Runs on the current stream; the bits of quantization.dequantize_rows, rounded to bf16.
    """
    x = torch.empty(q.shape, dtype=torch.bfloat16, device=q.device)
    _launch_rows("dequantize_rows", x, q, scale)
    return x


def rows_grid(rows: int, columns: int, num_experts: int = 0) -> tuple[int, int, int]:
    return -(-rows // 8) + -(-num_experts // 8), -(-columns // 1024), 1


def _launch_rows(entry: str, x: Tensor, q: Tensor, scale: Tensor, **by_block: Any) -> None:
    if scale.numel():
        args = _RowsArgs(x.data_ptr(), q.data_ptr(), scale.data_ptr(), *x.shape, **by_block)
        _launch(entry, x.device, rows_grid(args.rows, args.columns, args.num_experts), args)


def dequantize_mxfp4(packed: Tensor, scale: Tensor, out: Tensor) -> None:
    """packed: [L, P, I, K/2] uint8 on CUDA, scale: as ExpertWeights has it -> out [L, P*I, K] bf16.

    packed is contiguous in K and 4-byte aligned, out likewise, 16-byte aligned. Runs on the current stream; the bits of
    formats.mxfp4.dequantize_mxfp4.
    """
    num, planes, rows, width = packed.shape
    strides = *packed.stride()[:3], *out.stride()[:2]
    places = (t.data_ptr() for t in (packed, scale, out))
    threads = planes * -(-rows // 8) * (width // 4)
    args = _Mxfp4Args(*places, *strides, planes, rows, 2 * width)
    _launch("dequantize_mxfp4", out.device, (-(-threads // 256), 1, num), args)


def sum_rows(rows: Tensor, places: Tensor, num: int) -> Tensor:
    """rows: [R, H] bf16 on CUDA, contiguous, 16-byte aligned, H a multiple of 8; places: [T * num] int64 -> [T, H].

    Sums `num` rows each in their order, in fp32; row 0 counts as none. Runs on the current stream. Result: bf16.
    """
    out = rows.new_empty(len(places) // num, rows.shape[1])
    if out.numel():
        grid = (len(out), -(-out.shape[1] // (8 * 256)), 1)
        args = _SumArgs(rows.data_ptr(), places.data_ptr(), out.data_ptr(), num, out.shape[1])
        _launch("sum_rows", rows.device, grid, args)
    return out
