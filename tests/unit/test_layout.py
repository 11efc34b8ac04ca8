"""Region tables and the argument block that is filled from them."""

import ctypes
import random
import re
from dataclasses import replace

import pytest
import torch

from megamoe.config import ACTIVATIONS, MAX_GROUP_TOKENS, MAX_LOCAL_EXPERTS, MAX_TOP_K, Problem
from megamoe.errors import ArgumentError, WorkspaceTooSmall
from megamoe.formats import table
from megamoe.formats.weights import ExpertWeights, expected_weights
from megamoe.jit import abi, paths
from megamoe.jit.source import TILE
from megamoe.memory import arguments, layout


def problems(count=60, seed=0):
    pick = random.Random(seed)
    for _ in range(count):
        ranks = pick.choice([1, 2, 3, 4, 8])
        yield Problem(
            hidden=16 * pick.randint(1, 40),
            intermediate=16 * pick.randint(1, 40),
            num_experts=pick.randint(1, 40),
            top_k=pick.randint(1, 32),
            ep_size=ranks,
            rank=pick.randrange(ranks),
            max_tokens=pick.randint(1, 400),
            precision=pick.choice(["bf16", "fp8"]),
            activation=pick.choice(list(ACTIVATIONS.values())),
            bias=pick.random() < 0.5,
        )


def regions_of(problem):
    yield layout.window_regions(problem)
    yield layout.workspace_regions(problem, layout.default_pool_rows(problem))
    yield layout.state_regions(problem)


def test_regions_are_aligned_ordered_and_apart():
    for problem in problems():
        for regions in regions_of(problem):
            end = 0
            for region in regions.values():
                assert region.offset % layout.ALIGNMENT == 0
                assert region.offset >= end
                end = region.end
            assert layout.total_bytes(regions) >= end


def test_names_are_fields_of_args():
    fields = abi.field_names(abi.Args)
    windows = {name for name in fields if name.startswith("window_")}
    seen = set()
    for problem in problems():
        window, workspace, state = regions_of(problem)
        assert not set(window) & set(workspace) | set(workspace) & set(state)
        assert set(state) <= set(fields)
        assert set(window) <= windows
        assert set(workspace) <= {*fields, *arguments.GEMM_POINTERS, "h"}  # h: in maps only
        seen |= set(window)
    assert seen == windows


def test_shapes_are_those_of_the_header():
    """The comment of each field in args.h states its shape; this reads the comments."""
    problem = Problem(272, 144, 7, 3, ep_size=4, rank=1, max_tokens=70, precision="fp8")
    rows = layout.default_pool_rows(problem)
    tables = {name: region for regions in regions_of(problem) for name, region in regions.items()}
    values = {
        "L": 2, "K": 3, "H": 272, "I": 144, "M": rows, "C": 12, "R": 4, "max_tokens": 70,
    }  # fmt: skip

    def number(text):
        text = re.sub(r"ceil\((\w)/128\)", lambda m: str(-(-values[m[1]] // 128)), text.strip())
        return eval(text.replace("/", "//"), {}, values)

    checked = 0
    for line in abi.read_text().splitlines():
        found = re.match(r"\s+[\w\s*]+?(\w+);\s*//\s*(?:fp8: )?\[([^\]]+)\]", line)
        if found and found[1] in tables:
            region = tables[found[1]]
            stated = tuple(number(part) for part in found[2].split(","))
            shape = region.shape[:-1] if found[1] == "window_routes" else region.shape
            assert shape == stated, found[1]
            checked += 1
    assert checked >= 18


def test_window_is_the_same_on_every_rank():
    for problem in problems():
        tables = {
            repr(layout.window_regions(replace(problem, rank=r))) for r in range(problem.ep_size)
        }
        assert len(tables) == 1


def test_views_do_not_overlap():
    problem = Problem(64, 48, 5, 2, ep_size=2, max_tokens=40, precision="fp8")
    regions = layout.window_regions(problem)
    memory = torch.zeros(layout.total_bytes(regions), dtype=torch.uint8)
    for i, region in enumerate(regions.values()):
        region.view(memory).view(torch.uint8).fill_(i + 1)
    for i, region in enumerate(regions.values()):
        view = region.view(memory)
        assert view.shape == region.shape
        assert (view.view(torch.uint8) == i + 1).all()


def test_pool_sizes():
    for problem in problems(200):
        least, default, worst = (
            layout.min_pool_rows(problem),
            layout.default_pool_rows(problem),
            layout.worst_pool_rows(problem),
        )
        assert least <= default <= worst
        assert [rows % 128 for rows in (least, default, worst)] == [0, 0, 0]
        local = problem.num_local_experts()
        if (
            local
        ):  # 32 tokens that all name one expert, K times; 32 * K rows spread over all experts
            assert least >= -(-32 * problem.top_k // 128) * 128 + 128 * (local - 1)
    problem = Problem(64, 64, 8, 2)
    for rows in (layout.min_pool_rows(problem) - 128, layout.min_pool_rows(problem) + 1):
        with pytest.raises(WorkspaceTooSmall, match="pool_rows"):
            layout.workspace_regions(problem, rows)


def test_default_pool_of_deepseek():
    problem = Problem(7168, 2048, 256, 8, ep_size=4, max_tokens=8192, precision="fp8")
    assert layout.default_pool_rows(problem) == 8192 * 8 * 5 // 4 + 128 * 64
    report = layout.memory_report(problem)
    assert report["window_bytes"] < 0.6e9
    assert "y_rows" in report["text"]
    assert report["state_bytes"] == 8192 * 4 * 8 * 8 + -(-64 * 1025 * 4 // 256) * 256
    assert "state of a call            2.3 MiB" in report["text"]


def test_constants_equal_the_kernels():
    files = ("schedule/order.h", "cta/smem.h", "roles/routes.cuh", "formats/format.h")
    text = "\n".join((paths.CSRC / "megamoe" / name).read_text() for name in files)
    constants = {
        name: int(value) for name, value in re.findall(r"constexpr int (\w+) = (\d+);", text)
    }
    tile = abi.TILES[TILE]
    assert (tile.rows, abi.GROUP_ROWS, abi.SLOT_K_BYTES) == (layout.BLOCK_ROWS, 64, 128)
    assert constants["chunk_tokens"] == layout.CHUNK_TOKENS
    assert tile.half_columns == constants["scale_group"] == table.SCALE_GROUP
    assert constants["max_local_experts"] == MAX_LOCAL_EXPERTS
    assert constants["max_top_k"] == MAX_TOP_K <= 1 << constants["route_k_bits"]
    assert 1 << (32 - 2 - constants["route_k_bits"]) >= MAX_GROUP_TOKENS  # two mark bits


# --- the argument block ---


def make_weights(problem):
    shapes = expected_weights(problem)
    return ExpertWeights(
        **{name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
    )


class Recorder:
    """An encoder that is as strict as the driver."""

    def __init__(self):
        self.maps = []

    def __call__(self, base, dims, strides, box, size):
        assert base > 0
        assert base % 16 == 0
        assert len(dims) == len(box) == len(strides) + 1
        assert all(n >= 1 for n in dims)
        assert all(s % 16 == 0 for s in strides)
        assert box[0] * size == 128
        self.maps.append((base, dims, strides, box, size))
        return bytes([len(self.maps)]) * 128


def filled(problem, tokens=None, ids=torch.int32, **options):
    """Return (args, plan, maps, tensors)."""
    tokens = problem.max_tokens if tokens is None else tokens
    x = torch.zeros(tokens, problem.hidden, dtype=torch.bfloat16)
    topk_ids = torch.zeros(tokens, problem.top_k, dtype=ids)
    topk_weights, y = torch.zeros(tokens, problem.top_k), torch.zeros_like(x)
    weights, recorder, args = make_weights(problem), Recorder(), abi.aligned(abi.Args)
    rows = layout.default_pool_rows(problem)
    bases = [0x7F0000000000 + (rank << 32) for rank in range(problem.ep_size)]
    plan, count = arguments.Plan(problem, rows), options.pop("num_tokens_device", None)
    arguments.fill_static(
        args, plan, window_bases=bases, workspace_base=1 << 40, encoder=recorder,
        timeout_ns=5, fault=0x1000, **options,
    )  # fmt: skip
    arguments.fill_weights(args, plan, weights, recorder)
    arguments.fill_call(args, x, topk_ids, topk_weights, y, count)
    return args, plan, recorder.maps, (x, topk_ids, topk_weights, y, weights)


def test_every_field_is_filled():
    problem = Problem(
        272,
        144,
        7,
        3,
        ep_size=2,
        rank=1,
        max_tokens=70,
        precision="fp8",
        bias=True,
        activation="swiglu_oai",
    )
    count = torch.ones(1, dtype=torch.int32)
    args, plan, maps, tensors = filled(
        problem, ids=torch.int64, num_tokens_device=count, profile=0x2000
    )
    empty = {name for name in abi.field_names(abi.Args) if not _value(getattr(args, name))}
    # the first region; 0 = the kernel chooses; not in a forward launch
    assert empty == {"window_abort", "step_blocks", "training"}
    for name, region in plan.workspace.items():
        found = [getattr(args, name)] if hasattr(args, name) else []
        found += [
            getattr(args.gemm[i], field) for i, field in arguments.GEMM_POINTERS.get(name, ())
        ]
        assert set(found) == ({(1 << 40) + region.offset} if name != "h" else set()), name
    for name, region in plan.state.items():
        assert getattr(args, name) == (1 << 40) + plan.state_offset + region.offset
    arguments.fill_state(args, plan, 1 << 44)
    assert {n: getattr(args, n) - (1 << 44) for n in plan.state} == {
        n: region.offset for n, region in plan.state.items()
    }
    for gemm, n, k in zip(args.gemm, (144, 272), (272, 144), strict=True):
        assert (gemm.n, gemm.k) == (n, k)
        unset = {f for f in abi.field_names(abi.Gemm) if not _value(getattr(gemm, f))}
        assert unset == ({"out_scale"} if n == 272 else set())  # y_rows is bf16
    given = tensors[4]
    assert [(g.b_scale, g.bias) for g in args.gemm] == [
        (given.w13_scale.data_ptr(), given.b13.data_ptr()),
        (given.w2_scale.data_ptr(), given.b2.data_ptr()),
    ]
    assert args.x == tensors[0].data_ptr()
    assert args.config_hash == problem.fingerprint()
    assert (args.num_tokens, args.max_chunks, args.expert_begin, args.num_local_experts) == (
        70,
        6,
        4,
        3,
    )
    assert args.abort == args.window[1] + args.window_abort
    assert len(maps) == 5


def _value(field):
    return any(bytes(field)) if isinstance(field, ctypes.Structure | ctypes.Array) else field


@pytest.mark.parametrize(("precision", "size"), [("bf16", 2), ("fp8", 1)])
@pytest.mark.parametrize(("activation", "planes"), [("swiglu", 2), ("relu2", 1)])
def test_map_geometry(precision, size, activation, planes):
    problem = Problem(272, 144, 4, 2, max_tokens=64, precision=precision, activation=activation)
    args, plan, maps, tensors = filled(problem)
    m, weights, inner = plan.pool_rows, tensors[4], 128 // size
    x_pool, h, y_rows, w13, w2 = maps
    assert x_pool == (args.x_pool, (272, m), (272 * size,), (inner, 64), size)
    assert h == ((1 << 40) + plan.workspace["h"].offset, (144, m), (144 * size,), (inner, 64), size)
    assert y_rows == (args.y_rows, (272, m), (544,), (64, 64), 2)
    strides = (272 * size, 144 * 272 * size, planes * 144 * 272 * size)
    assert w13 == (weights.w13.data_ptr(), (272, 144, planes, 4), strides, (inner, 128, 1, 1), size)
    strides = (144 * size, 272 * 144 * size, 272 * 144 * size)
    assert w2 == (weights.w2.data_ptr(), (144, 272, 1, 4), strides, (inner, 128, 1, 1), size)
    order = [bytes(getattr(gemm, name))[0] for gemm in args.gemm for name in ("a", "b", "out")]
    assert order == [1, 4, 2, 2, 5, 3]


def test_maps_are_legal_without_tokens_or_experts():
    for problem in problems():
        filled(problem, tokens=0)
    problem = Problem(64, 64, 2, 1, ep_size=4, rank=3, max_tokens=8)
    assert problem.num_local_experts() == 0
    args, _, maps, _ = filled(problem, tokens=0)
    assert maps[3][1] == (64, 64, 2, 1)
    assert args.num_local_experts == 0


def test_a_shared_window_sets_the_strides():
    small = Problem(64, 64, 4, 2, ep_size=2, max_tokens=32)
    rows = layout.default_pool_rows(small)
    plan = arguments.Plan(small, rows, window_tokens=100)
    assert plan.window == layout.window_regions(replace(small, max_tokens=100))
    args = abi.aligned(abi.Args)
    arguments.fill_static(
        args,
        plan,
        window_bases=[1 << 20, 1 << 21],
        workspace_base=1 << 30,
        encoder=Recorder(),
        timeout_ns=1,
        fault=0,
    )
    assert (args.max_tokens, args.max_chunks) == (100, 8)


def test_misaligned_tensors_are_refused():
    args = abi.aligned(abi.Args)
    storage = torch.zeros(8 * 64 + 1, dtype=torch.bfloat16)[1:].view(8, 64)
    ids, weights = torch.zeros(8, 2, dtype=torch.int32), torch.zeros(8, 2)
    with pytest.raises(ArgumentError, match="16-byte"):
        arguments.fill_call(args, storage, ids, weights, torch.zeros(8, 64, dtype=torch.bfloat16))
