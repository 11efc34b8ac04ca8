"""Region tables and the argument block that is filled from them."""

import ctypes
import random
import re
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from megamoe.core import table
from megamoe.core.config import ACTIVATIONS, MAX_GROUP_TOKENS, MAX_LOCAL_EXPERTS, MAX_TOP_K, Problem
from megamoe.core.errors import ArgumentError, WorkspaceTooSmall
from megamoe.formats.weights import ExpertWeights, TransposedWeights, expected_weights
from megamoe.jit import abi, paths
from megamoe.jit.source import TILE
from megamoe.launch import arguments, layout, training
from megamoe.testing.shapes import shape


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
    rows = layout.default_pool_rows(problem)
    yield layout.window_regions(problem)
    yield layout.workspace_regions(problem, rows)
    yield layout.state_regions(problem)
    yield layout.backward_regions(problem, rows)
    yield layout.train_state_regions(problem, rows)


def test_regions_are_aligned_ordered_and_apart():
    for problem in problems():
        for regions in regions_of(problem):
            end = 0
            for region in regions.values():
                assert region.offset % layout.ALIGNMENT == 0
                assert region.offset >= end
                end = region.end
            assert regions.bytes >= end


def test_names_are_fields_of_args():
    fields = abi.field_names(abi.Args)
    of_training = [
        n for s in ("State", "Backward", "Pushes") for n in abi.field_names(abi.STRUCTURES[s])
    ]
    windows = {name for name in fields + of_training if name.startswith("window_")}
    # what rows of the table, maps or parts of the argument name
    rows = {
        "h",
        "h_scale",
        "gemm1_done",
        "gemm2_done",
        "x_pool_scale",
        "panels",
        "panel_ready",
        "came",
    }
    seen = set()
    for problem in problems():
        window, workspace, state, backward, train_state = regions_of(problem)
        assert not set(window) & set(workspace) | set(workspace) & set(state)
        assert not (set(window) | set(workspace) | set(train_state)) & set(backward)
        assert set(state) <= set(fields)
        assert set(window) <= windows
        assert set(workspace) <= {*fields, *rows}
        assert set(backward) <= {*of_training, "dgu", "dgu_rows", "hs", "dgu_scale"}
        assert set(state) < set(train_state) <= {*fields, *of_training, "gu"}
        seen |= set(window)
    assert seen == windows


def test_shapes_are_those_of_the_header():
    """The comment of each field in args.h states its shape; this reads the comments."""
    problem = Problem(272, 144, 7, 3, ep_size=4, rank=1, max_tokens=70, precision="fp8")
    rows = layout.default_pool_rows(problem)
    tables = {name: region for regions in regions_of(problem) for name, region in regions.items()}
    values = {
        "L": 2, "K": 3, "H": 272, "I": 144, "M": rows, "C": 12, "R": 4, "max_tokens": 70,
        "P": 2, "S": 4, "ready_cells": 8192, "tokens": 64, "ids_shift": 1,
    }  # fmt: skip

    def number(text):
        text = re.sub(
            r"ceil\((\w)/(\d+)\)", lambda m: str(-(-values[m[1]] // int(m[2]))), text.strip()
        )
        return eval(text.replace("/", "//"), {}, values)

    checked = 0
    for line in abi.read_text().splitlines():
        found = re.match(r"\s+[\w\s*]+?(\w+);\s*//\s*(?:fp8: |scaled x: )?\[([^\]]+)\]", line)
        if found and found[1] in tables:
            region = tables[found[1]]
            stated = tuple(number(part) for part in found[2].split(","))
            shape = region.shape[:-1] if found[1] == "window_routes" else region.shape
            assert shape == stated, found[1]
            checked += 1
    assert checked >= 25


def test_window_is_the_same_on_every_rank():
    for problem in problems():
        tables = {
            repr(layout.window_regions(replace(problem, rank=r))) for r in range(problem.ep_size)
        }
        assert len(tables) == 1


def test_views_do_not_overlap():
    problem = Problem(64, 48, 5, 2, ep_size=2, max_tokens=40, precision="fp8")
    regions = layout.window_regions(problem)
    memory = torch.zeros(regions.bytes, dtype=torch.uint8)
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
        with pytest.raises(WorkspaceTooSmall, match="pool_rows"):
            layout.train_state_regions(problem, rows)


def test_default_pool_of_deepseek():
    problem = Problem(7168, 2048, 256, 8, ep_size=4, max_tokens=8192, precision="fp8")
    assert layout.default_pool_rows(problem) == 8192 * 8 * 5 // 4 + 128 * 64
    report = layout.memory_report(problem)
    assert report["window_bytes"] < 0.6e9
    assert "y_rows" in report["text"]
    assert report["state_bytes"] == 8192 * 4 * 8 * 8 + -(-64 * 1025 * 4 // 256) * 256
    assert "state of a call            2.3 MiB" in report["text"]


@pytest.mark.parametrize(
    ("name", "tokens", "limit"), [("qwen3-30b", 8192, 0.40e9), ("dsv3", 4096, 0.60e9)]
)
def test_what_a_training_call_keeps(name, tokens, limit):
    """The state of a call at capacity, EP4; of FP8 it is no larger, since tokens take half the bytes."""
    s = shape(name)
    problem = Problem(
        s.hidden, s.intermediate, s.num_experts, s.top_k, ep_size=4, max_tokens=tokens
    )
    report = layout.memory_report(problem)
    rows = report["pool_rows"]
    gu, tokens_saved = rows * 2 * s.intermediate * 2, 3 * tokens * s.hidden * 2
    assert gu + tokens_saved < report["train_state_bytes"] <= limit
    assert report["train_state_bytes"] < (gu + tokens_saved) * 1.01  # tables and header
    assert report["train_state_used_bytes"] < 0.85 * report["train_state_bytes"]
    worst = layout.worst_pool_rows(problem)
    more = (worst - rows) * 2 * s.intermediate * 2
    assert report["train_state_worst_bytes"] == report["train_state_bytes"] + more
    fp8 = layout.memory_report(replace(problem, precision="fp8"))
    assert fp8["train_state_bytes"] < report["train_state_bytes"]
    for key in ("train_state_bytes", "train_state_used_bytes", "backward_bytes"):
        assert f"{report[key] / 2**20:.1f} MiB" in report["line"]
        assert f"{report[key] / 2**20:.1f} MiB" in report["text"]


def test_what_does_not_train_keeps_nothing_for_it():
    problem = Problem(4096, 2048, 64, 8, max_tokens=1024, precision="fp8_channel")
    report, bf16, nvfp4 = (
        layout.memory_report(replace(problem, precision=p))
        for p in ("fp8_channel", "bf16", "bf16xnvfp4")
    )
    assert nvfp4["regions"] == bf16["regions"]
    assert nvfp4["transposes_bytes"] == 0 < nvfp4["copies_bytes"]
    rooms = nvfp4["training_regions"].pop("matrices")
    assert rooms == 5 * 3 * 4096 * 2048 * 2
    assert nvfp4["training_regions"].pop("matrices_ready") == 64 * 2 * 4
    assert nvfp4["training_regions"] == bf16["training_regions"]
    for key in ("backward", "train_state", "train_state_used", "train_state_worst"):
        assert report[f"{key}_bytes"] == 0 < bf16[f"{key}_bytes"]
    assert report["training_regions"] == {}
    for text in ("text", "line"):
        assert "training" in bf16[text]
        assert "training" not in report[text]


def test_what_an_even_load_uses():
    """All of 128 tokens of two ranks to both experts of two: everything is used but the slack of the pool."""
    problem = Problem(64, 48, 2, 2, ep_size=2, max_tokens=128)
    state = layout.train_state_regions(problem, 512)
    used = layout.train_state_used(problem, 512)
    assert used == sum(region.bytes for region in state.values()) - state["gu"].bytes // 2
    none = replace(problem, num_experts=1, top_k=1, rank=1)  # no experts, so no rows and no tokens
    state = layout.train_state_regions(none, 256)
    tables = [r.bytes for n, r in state.items() if n not in ("gu", "tokens")]
    assert layout.train_state_used(none, 256) == sum(tables)


def test_constants_equal_the_kernels():
    files = ("schedule/order.h", "cta/smem.h", "rows/routes.cuh", "formats/format.h")
    text = "\n".join((paths.CSRC / "megamoe" / name).read_text() for name in files)
    constants = {
        name: int(value) for name, value in re.findall(r"constexpr int (\w+) = (\d+);", text)
    }
    tile = abi.TILES[TILE]
    assert (tile.rows, abi.WARPGROUP_ROWS, abi.SLOT_K_BYTES) == (layout.BLOCK_ROWS, 64, 128)
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
    weights, recorder = make_weights(problem), Recorder()
    args = abi.aligned(abi.LAUNCHES[options.pop("launch", "forward")])
    rows = layout.default_pool_rows(problem)
    bases = [0x7F0000000000 + (rank << 32) for rank in range(problem.ep_size)]
    plan, count = arguments.Plan(problem, rows), options.pop("num_tokens_device", None)
    place = bases, 1 << 40
    arguments.fill_static(args, plan, recorder, *place, timeout_ns=5, fault=0x1000, **options)
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
    # The first region; 0 = the kernel chooses, 0 = all CTAs take part, whoever else is late; of a quantized x.
    assert empty == {"window_abort", "step_blocks", "join_ns", "peers_ns", "in_scale"}
    at = {name: (1 << 40) + region.offset for name, region in plan.workspace.items()}
    for name in at.keys() & set(abi.field_names(abi.Args)):
        assert getattr(args, name) == at[name], name
    first, second = args.gemm
    assert (first.a_scale, first.out_scale) == (at["x_pool_scale"], at["h_scale"])
    assert (second.a_scale, second.out_scale) == (at["h_scale"], None)
    assert (first.done, second.done) == (at["gemm1_done"], at["gemm2_done"])
    for name, region in plan.state.items():
        assert getattr(args, name) == (1 << 40) + plan.state_offset + region.offset
    arguments.fill_state(args, plan, 1 << 44)
    assert {n: getattr(args, n) - (1 << 44) for n in plan.state} == {
        n: region.offset for n, region in plan.state.items()
    }
    for gemm, n, k in zip(args.gemm, (144, 272), (272, 144), strict=True):
        assert (gemm.n, gemm.k) == (n, k)
        unset = {f for f in abi.field_names(type(gemm)) if not _value(getattr(gemm, f))}
        assert unset == {"m"} | ({"out_scale"} if n == 272 else set())  # y_rows is bf16
    given = tensors[4]
    assert [(g.b_scale, g.bias) for g in args.gemm] == [
        (given.w13_scale.data_ptr(), given.b13.data_ptr()),
        (given.w2_scale.data_ptr(), given.b2.data_ptr()),
    ]
    assert args.rows_in == tensors[0].data_ptr()
    assert args.config_hash == problem.fingerprint()
    assert (args.num_tokens, args.max_chunks, args.expert_begin, args.num_local_experts) == (
        70,
        6,
        4,
        3,
    )
    assert args.abort == args.window[1] + args.window_abort
    assert len(maps) == 8


def _value(field):
    return any(bytes(field)) if isinstance(field, ctypes.Structure | ctypes.Array) else field


@pytest.mark.parametrize(("precision", "size"), [("bf16", 2), ("fp8", 1)])
@pytest.mark.parametrize(("activation", "planes"), [("swiglu", 2), ("relu2", 1)])
def test_map_geometry(precision, size, activation, planes):
    problem = Problem(272, 144, 4, 2, max_tokens=64, precision=precision, activation=activation)
    args, plan, maps, tensors = filled(problem)
    m, weights, inner = plan.pool_rows, tensors[4], 128 // size
    x_pool, h, x_small, h_again, y_rows, h_small, w13, w2 = maps
    assert h == h_again
    assert x_pool == (args.x_pool, (272, m), (272 * size,), (inner, 64), size)
    assert h == ((1 << 40) + plan.workspace["h"].offset, (144, m), (144 * size,), (inner, 64), size)
    for small, whole in ((x_small, x_pool), (h_small, h)):
        assert small == (*whole[:3], (inner, 16), size)
    assert y_rows == (args.y_rows, (272, m), (544,), (64, 64), 2)
    strides = (272 * size, 144 * 272 * size, planes * 144 * 272 * size)
    assert w13 == (weights.w13.data_ptr(), (272, 144, planes, 4), strides, (inner, 128, 1, 1), size)
    strides = (144 * size, 272 * 144 * size, 272 * 144 * size)
    assert w2 == (weights.w2.data_ptr(), (144, 272, 1, 4), strides, (inner, 128, 1, 1), size)
    order = [bytes(getattr(g, n))[0] for g in args.gemm for n in ("a", "a_small", "b", "out")]
    first_a, first_small, w13_at, h_at, second_a, second_small, w2_at, y_at = order
    assert [maps[i - 1] for i in order] == [x_pool, x_small, w13, h, h, h_small, w2, y_rows]
    assert len({first_a, first_small, w13_at, h_at, second_small, w2_at, y_at}) == 7


def static_arguments(problem):
    plan, recorder = arguments.Plan(problem, layout.default_pool_rows(problem)), Recorder()
    args = abi.aligned(abi.LAUNCHES["packed" if problem.formats.panels else "forward"])
    arguments.fill_static(args, plan, recorder, [1 << 41], 1 << 40, timeout_ns=5, fault=0x1000)
    return plan, args, recorder.maps


def test_panels_have_room_where_a_launch_can_have_many_rows():
    problem = Problem(288, 160, 4, 2, max_tokens=1281, precision="fp8xmxfp4")
    plan, args, maps = static_arguments(problem)
    # An expert's panels: two of w13 with three slots of K and two of w2 with two, 256 rows each; room for all four.
    assert maps[6:] == [(args.expanded.panels, (128, 4 * 10 * 256), (128,), (128, 128), 1)]
    assert plan.workspace["panel_ready"].shape == (4, 4)
    assert (args.expanded.rooms, args.expanded.above) == (4, 4 * 640)
    plan, args, maps = static_arguments(replace(problem, max_tokens=1280))  # 2560 routes
    assert (len(maps), args.expanded.rooms, args.expanded.above) == (6, 0, 4 * 640)
    assert "panels" not in plan.workspace
    dsv3 = Problem(7168, 2048, 256, 8, 4, max_tokens=8192, precision="fp8xmxfp4")
    of_five_experts = 5 * 3 * 7168 * 2048
    assert layout.memory_report(dsv3)["regions"]["panels"] == of_five_experts
    for precision in ("fp8", "bf16xmxfp4", "bf16xnvfp4"):
        assert "panels" not in static_arguments(replace(dsv3, precision=precision))[0].workspace


def test_rows_by_quads_have_whole_groups():
    problem = Problem(288, 160, 4, 2, max_tokens=64, precision="fp8xmxfp4")
    plan, args, (x_pool, h, x_small, _, y_rows, h_small) = static_arguments(problem)
    assert x_pool == (args.x_pool, (384, plan.pool_rows), (384,), (128, 64), 1)
    assert h[1:] == ((256, plan.pool_rows), (256,), (128, 64), 1)
    assert [x_small, h_small] == [(*m[:3], (128, 16), 1) for m in (x_pool, h)]
    assert y_rows[1] == (288, plan.pool_rows)
    assert plan.window["window_x"].shape == (64, 384)
    assert [plan.workspace[n].shape[1] for n in ("x_pool", "h")] == [384, 256]
    assert layout.memory_report(problem)["regions"]["window_x"] == 64 * 384
    assert (args.gemm[0].k, args.gemm[1].k, args.hidden) == (288, 160, 288)


def test_maps_are_legal_without_tokens_or_experts():
    for problem in problems():
        filled(problem, tokens=0)
    problem = Problem(64, 64, 2, 1, ep_size=4, rank=3, max_tokens=8)
    assert problem.num_local_experts() == 0
    args, _, maps, _ = filled(problem, tokens=0)
    assert maps[6][1] == (64, 64, 2, 1)
    assert args.num_local_experts == 0


@pytest.mark.parametrize(("top_k", "places"), [(1, 1), (2, 2), (6, 2)])
def test_the_worst_pool_holds_what_distinct_experts_can_send(top_k, places):
    """A token names each of the rank's two experts once at most."""
    problem = Problem(64, 64, 8, top_k, ep_size=4, max_tokens=256)
    rows = 4 * 256 * places  # and each expert's last block may have 127 rows of padding
    assert rows + 2 * 127 <= layout.worst_pool_rows(problem) < rows + 2 * 127 + 128


def test_a_shared_window_sets_the_strides():
    small = Problem(64, 64, 4, 2, ep_size=2, max_tokens=32)
    rows = layout.default_pool_rows(small)
    plan = arguments.Plan(small, rows, window_tokens=100)
    large = arguments.Plan(replace(small, max_tokens=100), rows)
    for regions in ("window", "workspace", "state", "train_state", "backward", "stash"):
        assert getattr(plan, regions) == getattr(large, regions), regions
    made = []
    for each in (plan, large):
        place, recorder = ([1 << 20, 1 << 21], 1 << 30), Recorder()
        train, backward, kept = (
            abi.aligned(abi.LAUNCHES[n]) for n in ("train", "backward", "stashed_weights")
        )
        arguments.fill_static(train, each, recorder, *place, timeout_ns=1, fault=0)
        arguments.fill_static(backward, each, recorder, *place, timeout_ns=1, fault=0)
        training.fill_train_state(train, each, STATE, recorder)
        training.fill_backward(backward, each, BACKWARD, recorder)
        training.fill_stashed_weights(kept, each, recorder, [1 << 22], {}, accumulate=False)
        assert (train.max_tokens, train.max_chunks, kept.max_chunks) == (100, 8, 8)
        train.config_hash = backward.config_hash = 0
        made.append([bytes(train), bytes(backward), bytes(kept), recorder.maps])
    assert made[0] == made[1]


def moved(t, by):
    """Return a copy that lies `by` bytes behind a multiple of 16."""
    elements = by // t.element_size()
    buffer = torch.zeros(t.numel() + 16 + elements, dtype=t.dtype)
    first = -buffer.data_ptr() % 16 // t.element_size() + elements
    found = buffer[first : first + t.numel()].view(t.shape)
    assert found.data_ptr() % 16 == by
    return found


@pytest.mark.parametrize("by", [2, 4, 8])
@pytest.mark.parametrize("name", ["x", "out"])
def test_misaligned_tensors_are_refused(name, by):
    rows = {n: torch.zeros(8, 64, dtype=torch.bfloat16) for n in ("x", "out")}
    rows[name] = moved(rows[name], by)
    ids, weights = torch.zeros(8, 2, dtype=torch.int32), torch.zeros(8, 2)
    with pytest.raises(ArgumentError, match="16-byte"):
        arguments.fill_call(
            abi.aligned(abi.LAUNCHES["forward"]), rows["x"], ids, weights, rows["out"]
        )


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("name", ["w13", "w2"])
def test_misaligned_weights_are_refused(name, precision):
    """The driver would refuse such a map later, by a number."""
    problem = Problem(288, 160, 3, 2, max_tokens=16, precision=precision)
    args, plan, _, tensors = filled(problem)
    for by in (0, 4, 8):
        weights = replace(tensors[4], **{name: moved(getattr(tensors[4], name), by)})
        with pytest.raises(ArgumentError, match="16-byte") if by else nullcontext():
            arguments.fill_weights(args, plan, weights, Recorder())


# --- launches that train ---

STATE, BACKWARD = 1 << 44, 1 << 45


def filled_backward(problem, dtype=torch.bfloat16, accumulate=False, **targets):
    """Return (args, plan, maps, weights) of a backward launch. targets: None for one that is not wanted."""
    weights, recorder = make_weights(replace(problem, precision="bf16")), Recorder()
    forward = abi.aligned(abi.LAUNCHES["backward"])
    plan = arguments.Plan(problem, layout.default_pool_rows(problem))
    place = [1 << 41] * problem.ep_size, 1 << 40
    arguments.fill_static(forward, plan, recorder, *place, timeout_ns=5, fault=0x1000)
    assert not recorder.maps  # the table is backward's own
    training.fill_backward(forward, plan, BACKWARD, recorder)
    if problem.formats.w.scaled:
        transposed = TransposedWeights.of(problem, weights.quantized(problem))
        training.fill_backward_weights(forward, plan, transposed, recorder)
        given_back = weights, transposed
    else:
        training.fill_backward_weights(forward, plan, weights, recorder)
        given_back = weights, None
    training.fill_train_state(forward, plan, STATE, recorder)
    made = {name: torch.empty_like(getattr(weights, name), dtype=dtype) for name in ("w13", "w2")}
    given = {name: t for name, t in (made | targets).items() if t is not None}
    training.fill_gradients(forward, plan, recorder, given, accumulate=accumulate)
    return forward, plan, recorder.maps, (*given_back, given)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_a_train_launch_points_into_its_state(precision):
    problem = Problem(272, 144, 7, 3, ep_size=2, rank=1, max_tokens=70, precision=precision)
    args, plan, _, _ = filled(problem, launch="train")
    recorder = Recorder()
    training.fill_train_state(args, plan, STATE, recorder)
    state = plan.train_state
    for name in ("route_ids", "route_weights", "chunk_prefix"):
        assert getattr(args, name) == STATE + state[name].offset
    t = args.state
    assert t.header == STATE + state["header"].offset
    assert t.tokens == STATE + state["tokens"].offset
    assert t.tokens_scale == (STATE + state["tokens_scale"].offset if precision == "fp8" else None)
    gu, row = STATE + state["gu"].offset, 144 * 2
    assert recorder.maps == [
        (gu + p * row, (144, plan.pool_rows), (2 * row,), (64, 64), 2) for p in range(2)
    ]
    assert [bytes(m)[0] for m in args.gu] == [1, 2]
    with pytest.raises(ArgumentError, match="state.*16-byte"):
        training.fill_train_state(args, plan, STATE + 8, recorder)


@pytest.mark.parametrize(("activation", "planes"), [("swiglu", 2), ("relu2", 1)])
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 2), (torch.float32, 4)])
def test_maps_of_a_backward_launch(precision, activation, planes, dtype, size):
    problem = Problem(
        272, 144, 4, 2, max_tokens=64, precision=precision, activation=activation, bias=True
    )
    db13 = torch.zeros(4, planes * 144)
    args, plan, maps, found = filled_backward(problem, dtype, accumulate=True, b13=db13)
    weights, transposed, given = found
    workspace = {n: (1 << 40) + r.offset for n, r in plan.workspace.items()}
    own = {n: BACKWARD + r.offset for n, r in plan.backward.items()}
    m, box = plan.pool_rows, (64, 64)
    dy_rows, hs = own.get("dy_rows", workspace["x_pool"]), own.get("hs", workspace["h"])
    for name in ("hs", "dy_rows", "dgu_rows", "dgu_scale"):
        assert (name in own) == (precision == "fp8")

    def rows(at, columns, rank=2, size=2):
        strides = (columns * size, m * columns * size, m * columns * size)[: rank - 1]
        return (at, (columns, m, 1, 1)[:rank], strides, (128 // size, 64, 1, 1)[:rank], size)

    def plane(base, i, size=2):
        row = 144 * size
        return (base + i * row, (144, m), (planes * row,), (128 // size, box[1]), size)

    def matrix(w, inner, outer, w_planes, box, size):
        strides = (inner * size, outer * inner * size, w_planes * outer * inner * size)
        return (w.data_ptr(), (inner, outer, w_planes, 4), strides, box, size)

    pool, in_fp8, as_they_lie = workspace["x_pool"], (128, 128, 1, 1), (64, 64, 1, 1)
    fp8 = precision == "fp8"
    dgu = [plane(own["dgu"], p) for p in range(planes)]
    dgu_rows = [plane(own["dgu_rows"], p, 1) for p in range(planes)] if fp8 else dgu
    if fp8:
        x_pool, x_of_forward = rows(pool, 272, size=1), rows(pool, 272, size=1)
        w2 = matrix(transposed.w2, 272, 144, 1, in_fp8, 1)
        w13 = matrix(transposed.w13, 144, 272, planes, in_fp8, 1)
        again = matrix(transposed.forward.w13, 272, 144, planes, in_fp8, 1)
    else:
        x_pool, x_of_forward = rows(pool, 272), rows(own["x_rows"], 272)
        w2 = matrix(weights.w2, 144, 272, 1, as_they_lie, 2)
        w13 = matrix(weights.w13, 272, 144, planes, as_they_lie, 2)
        again = matrix(weights.w13, 272, 144, planes, (64, 128, 1, 1), 2)
    of_gradient = (128 // size, 64, 1, 1)
    table = {  # A, B, out
        "gemm1": ([x_pool], w2, dgu),
        "gemm2": (dgu_rows, w13, [rows(workspace["y_rows"], 272)]),
        "dw13": (dgu, rows(own["x_rows"], 272, 4), [matrix(given["w13"], 272, 144, planes, of_gradient, size)]),
        "dw2": ([rows(dy_rows, 272)], rows(hs, 144, 4), [matrix(given["w2"], 144, 272, 1, of_gradient, size)]),
        "recompute": ([x_of_forward], again, dgu),
    }  # fmt: skip
    assert list(table) == abi.GEMMS
    for (name, (a, b, out)), row in zip(table.items(), args.gemm, strict=True):
        found = [maps[bytes(field)[0] - 1] for field in (*row.a, row.b, *row.out)]
        assert found == [a[0], a[-1], b, out[0], out[-1]], name
        assert not any(bytes(row.a_small)), name
    scales = dict.fromkeys(table, (None, None, None))
    if fp8:
        at, turned_scale = (
            own["dgu_scale"],
            [t.data_ptr() for t in (transposed.w2_scale, transposed.w13_scale)],
        )
        again = transposed.forward.w13_scale.data_ptr()
        scales["gemm1"] = workspace["x_pool_scale"], turned_scale[0], at
        scales["gemm2"] = at, turned_scale[1], None
        scales["recompute"] = workspace["x_pool_scale"], again, None
    numbers = {  # bias, done, m, n, k
        "gemm1": (None, workspace["gemm1_done"], 0, 144, 272),
        "gemm2": (None, workspace["gemm2_done"], 0, 272, 144),
        "dw13": (db13.data_ptr(), None, 144, 272, 0),
        "dw2": (None, None, 272, 144, 0),
        "recompute": (weights.b13.data_ptr(), None, 0, 144, 272),
    }
    for name, row in zip(table, args.gemm, strict=True):
        assert (row.a_scale, row.b_scale, row.out_scale) == scales[name], name
        assert (row.bias, row.done, row.m, row.n, row.k) == numbers[name], name
    of_state = plan.train_state["gu"].offset
    assert [maps[bytes(m)[0] - 1] for m in args.gu] == [
        plane(STATE + of_state, p % planes) for p in range(2)
    ]
    assert maps[bytes(args.hs)[0] - 1] == rows(hs, 144)
    assert args.x_pool == pool
    assert args.own.dy_rows == (dy_rows if fp8 else None)
    for name in ("x_rows", "row_weight", "d_s", "expert_rows", "grads_ready", "scheduled"):
        assert getattr(args.own, name) == own[name]
    assert args.own.b2 == weights.b2.data_ptr()
    assert (args.own.dw_bytes, args.own.accumulate) == (size, 1)
    assert args.own.window_d_weights == plan.window["window_d_weights"].offset > 0
    assert args.config_hash == problem.fingerprint()  # the kernel adds direction and epoch


def test_tensors_of_a_backward_call():
    problem = Problem(64, 48, 4, 2, max_tokens=8)
    args, _, _, _ = filled_backward(problem, w13=None)
    assert [row.m for row in args.gemm] == [0, 0, 0, 64, 0]  # dw13 is not wanted
    dy, x, dx = (torch.zeros(8, 64, dtype=torch.bfloat16) for _ in range(3))
    ids, d_weights = torch.zeros(8, 2, dtype=torch.int64), torch.zeros(8, 2)
    tensors = {"dy": dy, "x": x, "topk_ids": ids, "dx": dx, "d_topk_weights": d_weights}
    training.fill_backward_call(args, **tensors)
    assert (args.rows_in, args.topk_ids, args.rows_out) == (
        dy.data_ptr(),
        ids.data_ptr(),
        dx.data_ptr(),
    )
    assert (args.topk_weights, args.num_tokens, args.ids_are_int64) == (None, 8, 1)
    assert args.own.x == x.data_ptr()
    assert args.own.d_topk_weights == d_weights.data_ptr()
    for by in (2, 4, 8):
        with pytest.raises(ArgumentError, match="x is.*16-byte"):
            training.fill_backward_call(args, **{**tensors, "x": moved(x, by)})


def test_gradients_that_no_launch_can_write_are_refused():
    problem = Problem(64, 48, 4, 2, max_tokens=8, bias=True)
    args, plan, _, (weights, _, given) = filled_backward(problem)
    storage = torch.zeros(weights.w2.numel() + 1, dtype=torch.bfloat16)[1:]
    cases = {
        "dw13 and dw2": {**given, "w2": weights.w2.float()},
        "dw2 is.*16-byte": {**given, "w2": storage.view_as(weights.w2)},
        "db2 is.*contiguous fp32": {**given, "b2": weights.b2.bfloat16()},
    }
    for message, tensors in cases.items():
        with pytest.raises(ArgumentError, match=message):
            training.fill_gradients(args, plan, Recorder(), tensors)
    weights.w2 = weights.w2.float()
    with pytest.raises(ArgumentError, match="weights.w2.dtype"):
        training.fill_backward_weights(args, plan, weights, Recorder())


def test_backward_maps_are_legal_without_experts():
    problem = Problem(64, 64, 2, 1, ep_size=4, rank=3, max_tokens=8)
    args, _, maps, _ = filled_backward(problem)
    assert args.num_local_experts == 0
    assert all(dims[-1] == 1 for _, dims, _, _, _ in maps if len(dims) == 4)
