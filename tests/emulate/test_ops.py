"""The emulated machine itself, operation by operation, against numpy and torch."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megamoe.backends.emulate.memory import encode_emulated
from megamoe.jit import abi, host

SEEDS = (0, 1, 2, 3)


class KeepingArgs(abi.LAUNCHES["forward"]):
    """Args with an attribute for what they have addresses of."""


@pytest.fixture(scope="module")
def library() -> Any:
    source = Path(__file__).with_name("ops_test.cpp").read_text()
    return ctypes.CDLL(str(host.build_source(source, ("-Wall", "-Wextra", "-Werror"))))


def make_args(numbers: list[int], **fields: Any) -> Any:
    """Return Args; tensors and arrays become addresses, bytes become tensor maps."""
    args = abi.aligned(KeepingArgs)
    args.keep = [np.array(numbers, np.int32), *fields.values()]
    args.topk_ids = args.keep[0].ctypes.data
    maps = {"map_a": args.gemm[0].a[0], "map_b": args.gemm[0].b, "map_out": args.gemm[1].out[0]}
    called = {"x": "rows_in", "y": "rows_out"}
    for given, value in fields.items():
        name = called.get(given, given)
        if isinstance(value, bytes):
            ctypes.memmove(ctypes.addressof(maps[name]), value, 128)
        elif isinstance(value, np.ndarray):
            setattr(args, name, value.ctypes.data)
        elif isinstance(value, torch.Tensor):
            setattr(args, name, value.data_ptr())
        else:
            setattr(args, name, value)
    return args


def run(function: Any, *ranks: Any, num_ctas: int = 1, seed: int = 0) -> tuple[int, str]:
    size = ctypes.sizeof(abi.LAUNCHES["forward"])
    block = ctypes.create_string_buffer(size * len(ranks) + 64)
    address = ctypes.addressof(block) + -ctypes.addressof(block) % 64
    for i, args in enumerate(ranks):
        ctypes.memmove(address + i * size, ctypes.addressof(args), size)
    report = ctypes.create_string_buffer(1 << 16)
    status = function(
        ctypes.c_void_p(address),
        len(ranks),
        num_ctas,
        ctypes.c_uint64(seed),
        report,
        ctypes.c_size_t(1 << 16),
    )
    return status, report.value.decode()


def launch(function: Any, *ranks: Any, **options: int) -> None:
    status, report = run(function, *ranks, **options)
    assert status == 0, report


def aligned(nbytes: int) -> np.ndarray:
    raw = np.zeros(nbytes + 16, np.uint8)
    start = -raw.ctypes.data % 16
    return raw[start : start + nbytes]


def box_of(tensor: np.ndarray, at: list[int], box: list[int]) -> np.ndarray:
    """Cut a box, slowest dimension first, zero where it is out of bounds."""
    out = np.zeros(box, tensor.dtype)
    for index in np.ndindex(*box):
        where = tuple(a + i for a, i in zip(at, index, strict=True))
        if all(0 <= w < n for w, n in zip(where, tensor.shape, strict=True)):
            out[index] = tensor[where]
    return out


def swizzled(rows: np.ndarray) -> np.ndarray:
    """[rows, 128] bytes -> as they lie in shared memory: chunk c of row r at chunk c ^ (r % 8)."""
    out = np.empty_like(rows)
    for row, chunk in np.ndindex(rows.shape[0], 8):
        to = chunk ^ (row % 8)
        out[row, 16 * to : 16 * to + 16] = rows[row, 16 * chunk : 16 * chunk + 16]
    return out


def matrix_map(tensor: np.ndarray, box_rows: int, columns: int | None = None) -> bytes:
    """Return the map of a [rows, columns] array whose rows may be longer than `columns`."""
    size = tensor.itemsize
    dims = (columns or tensor.shape[1], tensor.shape[0])
    return encode_emulated(
        tensor.ctypes.data, dims, (tensor.strides[0],), (128 // size, box_rows), size
    )


# --- barriers, warps ---


@pytest.mark.parametrize("seed", SEEDS)
def test_ring_of_mbarriers(library: Any, seed: int) -> None:
    laps = 50
    y = np.full((laps, 96), -1, np.int32)
    launch(library.test_ring, make_args([laps], y=y), seed=seed)
    assert (y == np.arange(laps)[:, None]).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_named_barriers(library: Any, seed: int) -> None:
    y = np.full(128, -1, np.int32)
    launch(library.test_named, make_args([], y=y), seed=seed)
    assert (y == 0).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_warp_operations(library: Any, seed: int) -> None:
    v = np.random.default_rng(seed).integers(0, 12, 32).astype(np.int32)
    y = np.zeros((32, 8), np.uint32)
    launch(library.test_warp, make_args([], x=v, y=y), seed=seed)
    lanes = np.arange(32)
    matches = [sum(1 << int(j) for j in lanes if v[j] == v[i]) for i in lanes]
    expected = np.stack(
        [
            v[(lanes + 5) % 32],
            v[lanes ^ 9],
            np.full(32, sum(1 << int(i) for i in lanes if v[i] % 2)),
            matches,
            np.full(32, v[3]),
            [m.bit_count() for m in matches],
            [(m & -m).bit_length() - 1 for m in matches],
            (1 << lanes) - 1,
        ],
        axis=1,
    )
    assert (y == expected).all()


# --- bulk copies ---


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("dtype", "at"),
    [(np.uint16, (0, 0)), (np.uint16, (64, 40)), (np.uint8, (128, 8)), (np.uint8, (0, 96))],
)
def test_load_2d(library: Any, seed: int, dtype: Any, at: tuple[int, int]) -> None:
    rng = np.random.default_rng(seed)
    size = np.dtype(dtype).itemsize
    memory = aligned(100 * 160 * size)
    tensor = memory.view(dtype).reshape(100, 160)
    tensor[:] = rng.integers(1, 256, tensor.shape)
    columns = 144 if size == 1 else 96  # what lies right of it in memory must not come along
    y = np.zeros((64, 128), np.uint8)
    args = make_args([*at, 0, 0, y.nbytes, 2, 0], map_a=matrix_map(tensor, 64, columns), y=y)
    launch(library.test_load, args, seed=seed)
    expected = box_of(tensor[:, :columns], [at[1], at[0]], [64, 128 // size])
    assert (y == swizzled(expected.view(np.uint8))).all()


@pytest.mark.parametrize("at", [(0, 0, 0, 0), (64, 24, 1, 2), (0, 40, 0, 1)])
def test_load_4d(library: Any, at: tuple[int, ...]) -> None:
    tensor = aligned(3 * 2 * 48 * 80 * 2).view(np.uint16).reshape(3, 2, 48, 80)
    tensor[:] = np.random.default_rng(1).integers(1, 1 << 16, tensor.shape)
    y = np.zeros((32, 128), np.uint8)
    strides = tuple(reversed(tensor.strides[:3]))
    tensor_map = encode_emulated(
        tensor.ctypes.data, tuple(reversed(tensor.shape)), strides, (64, 32, 1, 1), 2
    )
    launch(library.test_load, make_args([*at, y.nbytes, 4, 0], map_a=tensor_map, y=y))
    expected = box_of(tensor, list(reversed(at)), [1, 1, 32, 64])
    assert (y == swizzled(expected.reshape(32, 64).view(np.uint8))).all()


def test_bulk_load(library: Any) -> None:
    x = aligned(512)
    x[:] = np.arange(512) % 251
    y = np.zeros(512, np.uint8)
    launch(library.test_load, make_args([0, 0, 0, 0, 512, 1, 0], x=x, y=y))
    assert (y == x).all()


def test_data_read_before_its_barrier_is_poison(library: Any) -> None:
    tensor = aligned(64 * 128).reshape(64, 128)
    y = np.zeros((64, 128), np.uint8)
    launch(
        library.test_load,
        make_args([0, 0, 0, 0, y.nbytes, 2, 1], map_a=matrix_map(tensor, 64), y=y),
    )
    assert (y[0] == 0xFF).all()


def store(
    library: Any, at: tuple[int, int], *, seed: int = 0, overwrite: int = 0, early: int = 0
) -> tuple[Any, ...]:
    rng = np.random.default_rng(5)
    image = rng.integers(1, 256, (64, 128)).astype(np.uint8)
    memory = aligned(100 * 160 * 2)
    tensor = memory.view(np.uint16).reshape(100, 160)
    seen = np.zeros_like(tensor)
    args = make_args(
        [*at, 0, 0, overwrite, early, image.nbytes, tensor.nbytes, 2],
        x=swizzled(image),
        y_rows=memory,
        x_pool=seen,
        map_out=matrix_map(tensor, 64, 96),
    )
    launch(library.test_store, args, seed=seed)
    expected = np.zeros((300, 300), np.uint16)
    expected[at[1] : at[1] + 64, at[0] : at[0] + 64] = image.view(np.uint16)
    expected[:, 96:] = 0
    return tensor, seen, expected[:100, :160]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("at", [(0, 0), (64, 40), (32, 90)])
def test_store_2d(library: Any, seed: int, at: tuple[int, int]) -> None:
    tensor, seen, expected = store(library, at, seed=seed)
    assert (tensor == expected).all()
    assert (seen == expected).all()


def test_lifetime_mistakes_of_a_store_show(library: Any) -> None:
    overwritten, unseen = 0, 0
    for seed in range(8):
        tensor, _, expected = store(library, (0, 0), seed=seed, overwrite=1)
        overwritten += not (tensor == expected).all()
        _, seen, expected = store(library, (0, 0), seed=seed, early=1)
        unseen += not (seen == expected).all()
    assert overwritten > 0
    assert unseen > 0


class Store4d:
    """A [3, 2, 100, columns] tensor of bf16 (as bits) or fp32, a box of 64 rows x 128 bytes, and both's sum."""

    def __init__(self, dtype: Any, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.dtype, self.width = dtype, 128 // dtype().itemsize
        self.columns = self.width + 24
        self.before = self.numbers(rng, (3, 2, 100, self.columns + 40))
        self.image = self.numbers(rng, (64, self.width))

    def numbers(self, rng: Any, shape: tuple[int, ...]) -> np.ndarray:
        values = torch.from_numpy(rng.standard_normal(shape).astype(np.float32))
        return (
            values.bfloat16().view(torch.uint16).numpy()
            if self.dtype is np.uint16
            else values.numpy()
        )

    def stored(self, library: Any, at: tuple[int, ...], kind: int, seed: int = 0) -> np.ndarray:
        memory = aligned(self.before.nbytes)
        tensor = memory.view(self.dtype).reshape(self.before.shape)
        tensor[:] = self.before
        dims = (self.columns, 100, 2, 3)  # what lies right of it in memory must not change
        strides = tuple(reversed(tensor.strides[:3]))
        args = make_args(
            [*at, 0, 0, self.image.nbytes, memory.nbytes, kind],
            x=swizzled(self.image.view(np.uint8)),
            y_rows=memory,
            x_pool=np.zeros_like(memory),
            map_out=encode_emulated(
                memory.ctypes.data, dims, strides, (self.width, 64, 1, 1), self.dtype().itemsize
            ),
        )
        launch(library.test_store, args, seed=seed)
        return tensor

    def sum(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        if self.dtype is not np.uint16:
            return a + b
        values = [torch.from_numpy(v.copy()).view(torch.bfloat16).float() for v in (a, b)]
        return (values[0] + values[1]).bfloat16().view(torch.uint16).numpy()

    def expected(self, at: tuple[int, ...], kind: int, *, clips: bool = True) -> np.ndarray:
        out, (c0, c1, c2, c3) = self.before.copy(), at
        columns = self.columns if clips else out.shape[3]
        rows, width = max(0, min(64, 100 - c1)), max(0, min(self.width, columns - c0))
        if c2 < 2 and c3 < 3 and rows and width:
            place, image = (
                (c3, c2, slice(c1, c1 + rows), slice(c0, c0 + width)),
                self.image[:rows, :width],
            )
            out[place] = self.sum(out[place], image) if kind == 5 else image
        return out


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", [4, 5])
@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
def test_store_and_add_4d(library: Any, dtype: Any, kind: int, seed: int) -> None:
    """Equal bits with numpy, wherever the box lies; each element is added once, whenever the write happens."""
    case = Store4d(dtype, seed)
    outside = [(case.width, 100, 0, 0), (2 * case.width, 0, 0, 0), (0, 0, 2, 0), (0, 0, 0, 3)]
    for at in [(0, 0, 0, 0), (case.width, 40, 1, 2), (0, 64, 0, 1), *outside]:
        found = case.stored(library, at, kind, seed)
        assert (found == case.expected(at, kind)).all(), at
        assert (at in outside) == (found == case.before).all()
    # what must not pass: the coordinates in another order, no clip, writing for adding
    found = case.stored(library, (case.width, 40, 1, 2), kind, seed)
    assert (found != case.expected((case.width, 40, 1, 2), kind, clips=False)).any()
    assert (found != case.expected((case.width, 40, 1, 2), 9 - kind)).any()
    found = case.stored(library, (0, 1, 1, 2), kind, seed)
    assert all(
        (found != case.expected(at, kind)).any()
        for at in [(1, 0, 1, 2), (0, 2, 1, 1), (0, 1, 2, 1)]
    )


def test_adding_fp32_flushes_subnormals(library: Any) -> None:
    case = Store4d(np.float32, 0)
    case.before[:], case.image[:] = 2.0**-127, -(2.0**-140)
    case.image[0], case.image[1] = 1.0, 2.0**-126
    found = case.stored(library, (0, 0, 0, 0), 5)[0, 0]
    assert (found[0, : case.width] == 1.0).all()
    assert (found[1, : case.width] == np.float32(2.0**-126)).all()
    assert (found[2:64, : case.width] == 0).all()
    assert (found[64:] == np.float32(2.0**-127)).all()


# --- tensor cores ---


def gemm(
    library: Any,
    name: str,
    m: int,
    n: int,
    k: int,
    *,
    seed: int = 0,
    forget: int = 0,
    num_ctas: int = 2,
) -> Any:
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.bfloat16 if name == "bf16" else torch.float8_e4m3fn
    a, b = (torch.randn(rows, k, generator=generator).to(dtype) for rows in (m, n))
    size, inner = a.element_size(), 128 // a.element_size()
    c = torch.full((m, n), float("nan"))
    args = make_args(
        [m, n, k, forget],
        map_a=encode_emulated(a.data_ptr(), (k, m), (k * size,), (inner, 64), size),
        map_b=encode_emulated(
            b.data_ptr(),
            (k, n, 1, 1),
            (k * size, n * k * size, n * k * size),
            (inner, 128, 1, 1),
            size,
        ),
        y=c,
        x=a,
        x_pool=b,  # only to keep it alive
    )
    status, report = run(getattr(library, f"test_gemm_{name}"), args, num_ctas=num_ctas, seed=seed)
    return status, report, c, a.float() @ b.float().T


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["bf16", "e4m3"])
@pytest.mark.parametrize(
    ("m", "n", "k"), [(128, 128, 64), (200, 304, 272), (64, 128, 16), (130, 16, 640)]
)
def test_warp_specialised_gemm(library: Any, seed: int, name: str, m: int, n: int, k: int) -> None:
    status, report, c, expected = gemm(library, name, m, n, k, seed=seed)
    assert status == 0, report
    assert (c - expected).abs().max() < 1e-3


def test_gemm_bits_do_not_depend_on_the_order(library: Any) -> None:
    results = []
    for num_ctas in (1, 3):
        for _ in range(2):
            results.append(gemm(library, "e4m3", 200, 304, 272, num_ctas=num_ctas)[2])
    assert all(torch.equal(results[0], r) for r in results)


# --- numbers ---


def test_conversions(library: Any) -> None:
    rng = np.random.default_rng(0)
    every_bf16 = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    scale = np.exp2(rng.integers(-14, 10, 100000)).astype(np.float32)
    random = rng.standard_normal(100000).astype(np.float32) * scale
    every_e4m3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    finite = np.sort(every_e4m3[np.isfinite(every_e4m3)])
    ties = (finite[1:] + finite[:-1]) / 2
    x = np.concatenate(
        [every_bf16, random, finite, ties, np.nextafter(ties, 1e9), np.nextafter(ties, -1e9)]
    )
    x = np.concatenate([x, np.zeros(len(x) % 2, np.float32)]).astype(np.float32)
    y = np.zeros((len(x) // 2, 3), np.uint32)
    launch(library.test_convert, make_args([len(x) // 2], x=x, y=y))

    values = torch.from_numpy(x)
    nan = values.isnan()
    bf16 = torch.from_numpy(np.ascontiguousarray(y[:, 0]).view(np.int16).copy()).view(
        torch.bfloat16
    )
    assert torch.equal(bf16[~nan].view(torch.int16), values[~nan].bfloat16().view(torch.int16))
    assert bf16[nan].isnan().all()
    lo = torch.from_numpy(np.ascontiguousarray(y[:, 2]).view(np.float32).copy())
    assert torch.equal(lo.nan_to_num(), bf16[::2].float().nan_to_num())

    packed = np.stack([y[:, 1] & 0xFF, y[:, 1] >> 8], axis=1).astype(np.uint8).reshape(-1)
    e4m3 = torch.from_numpy(packed)
    expected = values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(e4m3[~nan], expected[~nan])
    assert (e4m3[nan] == 0x7F).all()


def test_elementary_functions_flush_subnormals(library: Any) -> None:
    edges = [0.0, -0.0, 1e-40, -1e-40, 2.0**-126, 2.0**127, -126.0, -126.5, -150.0, 127.9, 128.0]
    random = np.random.default_rng(0).uniform(-126, 127, 1000)
    x = np.array([*edges, np.inf, -np.inf, np.nan, *random], np.float32)
    y = np.zeros((2, len(x)), np.float32)
    launch(library.test_elementary, make_args([len(x)], x=x, y=y))
    with np.errstate(divide="ignore", over="ignore"):
        reals = np.where(np.abs(x) < 2.0**-126, np.copysign(0, x), x).astype(np.float64)
        for found, expected in zip(y, (np.exp2(reals), 1 / reals), strict=True):
            normal = (np.abs(expected) >= 2.0**-126) | np.isnan(expected)
            np.testing.assert_allclose(
                found[normal], expected[normal].astype(np.float32), rtol=2.0**-22
            )
            assert (found[~normal] == 0).all()
            assert (~normal).sum() >= 2


# --- waiting in vain ---


def test_reports_know_every_edge(library: Any) -> None:
    library.test_edge_name.restype = ctypes.c_char_p
    for edge in abi.Edge:
        assert library.test_edge_name(int(edge)).decode() == edge.name
    assert library.test_edge_name(max(abi.Edge) + 1).decode() == "?"


def await_args(
    forget: int, timeout_ns: int
) -> tuple[list[Any], np.ndarray, list[Any], list[np.ndarray]]:
    windows = [np.zeros(64, np.uint32) for _ in range(3)]
    y, faults = np.zeros(3, np.int32), [abi.FaultRecord() for _ in range(3)]
    ranks = []
    for rank in range(3):
        args = make_args(
            [forget], y=y, fault_ticket=np.zeros(1, np.uint32), fault=ctypes.addressof(faults[rank])
        )
        for peer, window in enumerate(windows):
            args.window[peer] = window.ctypes.data
        args.window_abort, args.abort = 4, windows[rank].ctypes.data + 4
        args.num_ranks, args.rank, args.timeout_ns = 3, rank, timeout_ns
        ranks.append(args)
    return ranks, y, faults, windows


@pytest.mark.parametrize("seed", SEEDS)
def test_await_succeeds(library: Any, seed: int) -> None:
    ranks, y, faults, windows = await_args(forget=0, timeout_ns=10**9)
    launch(library.test_await, *ranks, seed=seed)
    assert y.tolist() == [1, 1, 1]
    assert all(f.edge == 0 for f in faults)
    assert all(w[1] == 0 for w in windows)


@pytest.mark.parametrize("seed", SEEDS)
def test_await_gives_up(library: Any, seed: int) -> None:
    ranks, y, faults, windows = await_args(forget=1, timeout_ns=60 * 10**9)
    status, report = run(library.test_await, *ranks, seed=seed)
    assert status == 0, report
    assert y.tolist() == [1, 2, 2]
    for rank in (1, 2):
        fault = abi.fault_fields(faults[rank])
        assert (fault["edge"], fault["peer"], fault["index"]) == ("x_ready", 0, 3)
        assert (fault["expected"], fault["seen"], fault["role"]) == (5, 0, "load_a")
        assert windows[rank][1] == 1
    assert faults[0].edge == 0
    assert windows[0][1] == 1  # raised by the peers
    assert "edge x_ready, index 3, peer 0" in report


def test_await_without_timeout_is_a_deadlock(library: Any) -> None:
    ranks, *_ = await_args(forget=1, timeout_ns=0)
    status, report = run(library.test_await, *ranks)
    assert status == 1
    assert "rank 2 cta 0 warp 0.0: flag x_ready, index 3, peer 0: at least 5, now 0" in report


@pytest.mark.parametrize("seed", SEEDS)
def test_missing_arrival_is_a_deadlock(library: Any, seed: int) -> None:
    status, report, *_ = gemm(library, "bf16", 128, 256, 256, seed=seed, forget=1, num_ctas=1)
    assert status == 1
    # The first slot's `empty`: the second tile's third step needs what the first tile's last step held.
    empty = 3 * 2 * 16384 + 8 * 3
    missing = (
        f"rank 0 cta 0 warp 0.0: mbarrier at shared +{empty}, parity 1: phase 1, 2 of 2 arrivals"
    )
    assert missing in report


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (0, "shared +512 is not a multiple of 1024"),
        (1, "the tensor map has 2 dimensions"),
        (2, "this is no tensor map"),
        (3, "outside the CTA's 65536 bytes"),
        (4, "tx-count overflow"),
        (5, "more than 1 arrivals in one phase"),
        (6, "no mbarrier was initialised"),
        (7, "the lanes of a warp differ"),
        (8, "bulk loads in flight"),
        (9, "byte 5 behind shared memory was overwritten"),
        (10, "issue different instructions"),
        (11, "threads for those who wait"),
        (13, "setmaxnreg by some warps of a warpgroup only"),
        (14, "before its bulk stores have read"),
        (15, "the lanes of a warp differ: "),
        (16, "the warps of a warpgroup differ: setmaxnreg"),
        (17, "tma_store_4d: the tensor map has 2 dimensions"),
        (18, "tma_reduce_add_4d: elements of 1 bytes"),
        (19, "tma_prefetch_4d: the tensor map has 2 dimensions"),
    ],
)
def test_mistakes_are_named(library: Any, mistake: int, message: str) -> None:
    tensor = aligned(64 * 128).reshape(64, 128)
    strides = (128, 128 * 64, 128 * 64)
    bytes_map = encode_emulated(tensor.ctypes.data, (128, 64, 1, 1), strides, (128, 64, 1, 1), 1)
    args = make_args([mistake], map_a=matrix_map(tensor, 64), map_b=bytes_map, x=tensor)
    status, report = run(library.test_misuse, args)
    assert status != 0
    assert message in report


def test_too_many_registers(library: Any) -> None:
    status, report = run(library.test_misuse_512, make_args([12]))
    assert status == 2
    assert "hold 126976 registers" in report
    status, report = run(library.test_misuse_384, make_args([20]))
    assert status == 2
    assert "hold 65536 registers, the launch began with 64512" in report
