"""The kernels of one pass over memory, on fibers: the bits of the formulas in torch, and nothing beside them."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import apart, interleaved, with_gaps
from torch import Tensor

from megamoe.formats.mxfp4 import arrange_scales, dequantize_mxfp4
from megamoe.formats.quantization import (
    dequantize_rows,
    quantize_blockwise,
    quantize_rows,
    transpose_blocks,
)
from megamoe.jit import host, quantize
from megamoe.launch.passes import sum_rows
from megamoe.ops.groups import Groups, tails
from megamoe.ops.scales import by_block, num_places
from megamoe.testing.compare import same_bits

GUARD, UNTOUCHED = 64, 0xA5  # bytes behind each output, and what all of them hold before


@pytest.fixture(scope="module")
def kernel() -> Any:
    source = Path(__file__).with_name("quantize_test.cpp").read_text()
    return ctypes.CDLL(str(host.build_source(source, ("-Wall", "-Wextra", "-Werror"))))


def run(kernel: Any, w: Tensor, planes: int, expected: list[Tensor], seed: int) -> list[Tensor]:
    """Return what the kernel makes of w: [L, P*I, H] or [L, P, I, H], as many tensors as are expected."""
    by_plane = quantize.by_plane(w, planes)
    num, _, rows, columns = by_plane.shape
    grid = (ctypes.c_uint * 3)(-(-columns // 128), planes * -(-rows // 128), num)
    sizes = *by_plane.stride()[:3], planes, rows, columns

    def args_of(*places: int) -> Any:
        return quantize._Args(w.data_ptr(), *places, *[0] * (4 - len(places)), *sizes)

    entry = kernel.quantize if w.dtype == torch.bfloat16 else kernel.quantize_fp32
    return launched(entry, args_of, grid, expected, seed)


def launched(
    entry: Any, args_of: Any, grid: Any, expected: list[Tensor], seed: int
) -> list[Tensor]:
    """Return what a kernel writes to places like `expected`, and to nothing beside them."""
    raw = [torch.full((t.nbytes + GUARD,), UNTOUCHED, dtype=torch.uint8) for t in expected]
    outs = [r[:-GUARD].view(t.dtype).view(t.shape) for r, t in zip(raw, expected, strict=True)]
    args = args_of(*(t.data_ptr() for t in outs))
    report = ctypes.create_string_buffer(1 << 12)
    status = entry(
        ctypes.byref(args), grid, ctypes.c_uint64(seed), report, ctypes.c_size_t(1 << 12)
    )
    assert status == 0, report.value.decode()
    assert all(bool((r[-GUARD:] == UNTOUCHED).all()) for r in raw)
    return outs


def weights(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return weights with blocks far apart in size, one of zeros, one of tiny numbers."""
    generator = torch.Generator().manual_seed(sum(shape))
    w = torch.randn(shape, generator=generator) * torch.rand(shape, generator=generator)
    blocks = [-(-n // 128) for n in shape[1:]]
    sizes = torch.ldexp(
        torch.ones(shape[0], *blocks),
        torch.randint(-9, 9, (shape[0], *blocks), generator=generator),
    )
    sizes = sizes.repeat_interleave(128, 1).repeat_interleave(128, 2)[:, : shape[1], : shape[2]]
    w = (w * sizes).to(dtype)
    w[0, :128, :128] = 0
    w[-1, -1] = 1e-30
    return w


@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize(
    ("shape", "planes"),
    [
        ((2, 2 * 144, 272), 2),  # ragged planes, a ragged row
        ((3, 400, 136), 1),
        ((1, 2 * 256, 128), 2),
        ((2, 16, 8), 1),  # less than a block
        ((1, 2 * 48, 24), 2),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bits_are_those_of_the_formula(
    kernel: Any, shape: tuple[int, ...], planes: int, dtype: torch.dtype, seed: int
) -> None:
    w = weights(*shape, dtype=dtype)
    plain = quantize_blockwise(w, planes)
    transposes = list(transpose_blocks(*plain, planes))
    for expected in ([*plain], [*plain, *transposes]):
        assert all(map(same_bits, run(kernel, w, planes, expected, seed), expected))
    # the transposes alone, of what is e4m3
    q, scale = plain
    num, _, rows, columns = quantize.by_plane(q, planes).shape
    grid = (ctypes.c_uint * 3)(-(-columns // 128), planes * -(-rows // 128), num)
    strides = quantize.by_plane(q, planes).stride()[:3]

    def args_of(*places: int) -> Any:
        whole = q.data_ptr(), 0, scale.data_ptr(), *places
        return quantize._Args(*whole, *strides, planes, rows, columns)

    found = launched(kernel.transpose, args_of, grid, transposes, seed)
    assert all(map(same_bits, found, transposes))


@pytest.mark.parametrize("placed", [False, True])
def test_the_host_fills_the_launch_that_transposes(
    kernel: Any, placed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, scale = quantize_blockwise(weights(2, 2 * 144, 272), 2)
    expected, found = transpose_blocks(q, scale, 2), []

    def launch(entry: str, device: Any, grid: tuple[int, int, int], args: Any) -> None:
        report = ctypes.create_string_buffer(1 << 12)
        given = (ctypes.c_uint * 3)(*grid)
        end = ctypes.c_uint64(3), report, ctypes.c_size_t(1 << 12)
        assert kernel.transpose(ctypes.byref(args), given, *end) == 0, report.value.decode()
        found.append(entry)

    monkeypatch.setattr(quantize, "_launch", launch)
    out = tuple(torch.zeros_like(t) for t in expected) if placed else None
    made = quantize.transpose_weights(q, scale, 2, out)
    assert out is None or made[0] is out[0]
    assert all(map(same_bits, made, expected))
    assert found == ["transpose_weights"]


def test_fp32_weights_are_not_rounded_to_bf16_first(kernel: Any) -> None:
    w = weights(2, 144, 136, dtype=torch.float32)
    expected = list(quantize_blockwise(w))
    found = run(kernel, w, 1, expected, 0)
    assert not same_bits(found[0], quantize_blockwise(w.bfloat16())[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("change", [interleaved, apart, with_gaps])
def test_weights_are_read_as_they_lie(kernel: Any, change: Any, dtype: torch.dtype) -> None:
    w = weights(2, 2 * 144, 136, dtype=dtype)
    expected = list(quantize_blockwise(w, 2))
    assert all(map(same_bits, run(kernel, change(w), 2, expected, 1), expected))


def test_nan_stays_where_it_is(kernel: Any) -> None:
    w = weights(1, 144, 136)
    clean = run(kernel, w, 1, list(quantize_blockwise(w, 1)), 0)
    w[0, 130, 131] = torch.nan
    q, scale = run(kernel, w, 1, clean, 0)
    assert torch.nonzero(q.float().isnan()).tolist() == [[0, 130, 131]]
    assert same_bits(scale, clean[1])
    clean[0].view(torch.uint8)[0, 130, 131] = q.view(torch.uint8)[0, 130, 131]
    assert same_bits(q, clean[0])


@pytest.mark.parametrize("shape", [(1, 128), (37, 272), (5, 8), (3, 1032), (9, 2280)])
def test_rows_have_the_bits_of_the_formula(kernel: Any, shape: tuple[int, ...]) -> None:
    x = weights(1, *shape)[0].clone()
    x[-1, -1] = torch.nan
    rows, columns = shape
    grid = (ctypes.c_uint * 3)(*quantize.rows_grid(rows, columns))
    expected = list(quantize_rows(x.nan_to_num(0.0)))
    q = quantize_rows(x)[0].view(torch.uint8)[-1, -1]

    def args_of(*places: int) -> Any:
        return quantize._RowsArgs(x.data_ptr(), *places, rows, columns)

    found = launched(kernel.quantize_rows, args_of, grid, expected, 3)
    expected[0].view(torch.uint8)[-1, -1] = q
    assert all(map(same_bits, found, expected))
    q, scale = found
    wide = dequantize_rows(q, scale).bfloat16()

    def back(place: int) -> Any:
        return quantize._RowsArgs(place, q.data_ptr(), scale.data_ptr(), rows, columns)

    (again,) = launched(kernel.dequantize_rows, back, grid, [wide], 3)
    assert again.isnan().sum() == 1  # of which torch has other bits
    assert same_bits(again.nan_to_num(1.0), wide.nan_to_num(1.0))


@pytest.mark.parametrize(("tokens", "num", "columns"), [(5, 2, 8), (7, 4, 2056), (3, 1, 4096)])
def test_sums_of_rows_have_torchs_bits(
    kernel: Any, tokens: int, num: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(tokens)
    rows = torch.randn(tokens * num + 1, columns, generator=generator).bfloat16()
    rows[0] = torch.nan  # is never read
    places = torch.randperm(tokens * num, generator=generator) + 1
    places[:: num + 1] = 0
    begins = torch.arange(0, tokens * num, num)
    expected = sum_rows(rows, places, begins)
    by_hand = [
        sum((rows[p].float() for p in of if p), torch.zeros(columns)).bfloat16()
        for of in places.view(tokens, num)
    ]
    assert torch.equal(expected, torch.stack(by_hand))
    found = []

    def launch(entry: str, device: Any, grid: tuple[int, int, int], args: Any) -> None:
        report = ctypes.create_string_buffer(1 << 12)
        given = (ctypes.c_uint * 3)(*grid)
        status = kernel.sum_rows(
            ctypes.byref(args), given, ctypes.c_uint64(3), report, ctypes.c_size_t(1 << 12)
        )
        assert status == 0, report.value.decode()
        found.append(entry)

    monkeypatch.setattr(quantize, "_launch", launch)
    assert same_bits(quantize.sum_rows(rows, places, num), expected)
    assert found == ["sum_rows"]


def run_launch(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let quantize._launch() run on fibers; returns the entries that it ran."""
    found: list[str] = []

    def launch(entry: str, device: Any, grid: tuple[int, int, int], args: Any) -> None:
        report = ctypes.create_string_buffer(1 << 12)
        run_entry = getattr(kernel, entry.removeprefix("megamoe_"))
        end = ctypes.c_uint64(3), report, ctypes.c_size_t(1 << 12)
        assert run_entry(ctypes.byref(args), (ctypes.c_uint * 3)(*grid), *end) == 0, report.value
        found.append(entry)

    monkeypatch.setattr(quantize, "_launch", launch)
    return found


ENDS = [
    (None, 1),
    ([1, 1, 150, 151], 1),
    ([-5, 170, 3, 290], 1),  # ends that do not ascend, or are past the rows
    ([0] * 40 + [130] + [140] * 30, 1),  # more experts than lanes
    ([3, 131, 131, 150], 64),
    ([100, 110, 140], 128),
]


@pytest.mark.parametrize(("ends", "alignment"), ENDS)
def test_scales_by_block_are_the_formulas(
    kernel: Any, ends: list[int] | None, alignment: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zeros where no row of an expert is, of no row at all, too."""
    found, whole = run_launch(kernel, monkeypatch), weights(1, 170, 1160)[0]
    monkeypatch.setattr(quantize, "made", lambda t: t.fill_(7))  # what is not written would show
    offs = None if ends is None else torch.tensor(ends, dtype=torch.int32)
    num = 1 if ends is None else len(ends)
    groups = Groups(offs, alignment)
    for x in (whole, whole[:, :272].contiguous(), whole[:0]):
        made = quantize.quantize_rows(x, (offs, num, alignment), num_places(len(x), num))
        q, scale = quantize_rows(x)
        assert same_bits(made[0], q)
        inside = groups.of_rows(x)[1][:, None]
        assert same_bits(made[1], by_block(scale.where(inside, 0), groups, num))
    assert found == ["quantize_rows"] * 3


@pytest.mark.parametrize(("ends", "alignment"), ENDS)
def test_tails_are_torchs(
    kernel: Any, ends: list[int] | None, alignment: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, a = run_launch(kernel, monkeypatch), weights(1, 170, 280)[0][:, 8:]
    b = weights(1, 170, 24)[0]
    offs = None if ends is None else torch.tensor(ends, dtype=torch.int32)
    num = 1 if ends is None else len(ends)
    made = quantize.copy_tails(a, b, (offs, num, alignment))
    assert all(map(same_bits, made, tails(a, b, Groups(offs, alignment))))
    assert found == ["copy_tails"]


@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize(("rows", "columns"), [(144, 160), (20, 32), (257, 288)])
def test_mxfp4_has_the_bits_of_the_formula(
    kernel: Any, rows: int, columns: int, planes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planes interleaved, into memory with gaps; all scales, all codes."""
    generator = torch.Generator().manual_seed(rows)
    packed = torch.randint(
        0, 256, (3, rows, planes, columns // 2), dtype=torch.uint8, generator=generator
    )
    packed = packed.transpose(1, 2)
    scales = torch.randint(
        0, 255, (3, planes * rows, columns // 32), dtype=torch.uint8, generator=generator
    )
    scale = arrange_scales(scales, planes)
    expected = dequantize_mxfp4(packed, scale, planes, torch.bfloat16)
    whole = torch.full((3, planes * rows + 8, columns + 8), torch.nan, dtype=torch.bfloat16)
    found, out = run_launch(kernel, monkeypatch), whole[:, : planes * rows, :columns]
    quantize.dequantize_mxfp4(packed, scale, out)
    assert same_bits(out.contiguous(), expected)
    assert whole[:, planes * rows :].isnan().all()
    assert whole[:, :, columns:].isnan().all()
    assert found == ["dequantize_mxfp4"]
    scale[1, 0, 0, 16] = 255  # of 32 numbers
    quantize.dequantize_mxfp4(packed, scale, out)
    assert out.isnan().sum() == 32
