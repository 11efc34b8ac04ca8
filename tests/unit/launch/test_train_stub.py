"""Launches that train, without a GPU: arguments, memory, order, refusals. driver_stub.py has the driver."""

import threading
from dataclasses import replace

import driver_stub
import pytest
import torch
from driver_stub import (
    argument,
    backend_of,
    config,
    forward,
    kernel,
    launched,
    maps,
    number,
    refusal,
    tensors,
)

from megamoe.backends.call import Call, GradRequest, Needs
from megamoe.backends.mega.backend import MegaBackend
from megamoe.core.errors import ArgumentError, MegaMoEError, PeerFault, RankMismatch, WindowBroken
from megamoe.formats.weights import ExpertWeights, TransposedWeights
from megamoe.group.group import Group
from megamoe.jit import abi, module
from megamoe.launch import launches

pytestmark = pytest.mark.stub
FP8 = pytest.mark.parametrize("precision", ["fp8"])
BF16_TYPES = [torch.bfloat16, torch.bfloat16, torch.float32, torch.float32]


@pytest.fixture(params=["bf16", "fp8"])
def precision(request):
    return request.param


class Trained:
    """A layer with biases, its masters in bf16, and one forward and backward pass of it."""

    def __init__(self, precision, monkeypatch):
        self.precision, self.loaded = precision, []
        self.problem = replace(driver_stub.PROBLEM, precision=precision, bias=True)
        self.weights = driver_stub.weights_of(self.problem)
        self.master = driver_stub.weights_of(replace(self.problem, precision="bf16"))
        self.transposed = None
        if precision == "fp8":
            self.transposed = TransposedWeights.of(self.problem, self.weights)
        made = kernel()

        def load(variant, device):
            self.loaded.append(str(variant))
            return made

        monkeypatch.setattr(module, "load_kernel", load)

    def layer(self, **options):
        return backend_of(self.problem, few=False, **options)

    def forward(self, layer, tokens=5, **options):
        given = tensors(tokens)
        return *given, *layer.forward(Call(*given, self.weights, **options), keep=True)

    def backward(
        self, layer, call, needs=(True,) * 6, dy=None, w=None, num_tokens_device=None, **options
    ):
        x, ids, scores, _, state = call
        options = {"transposed": self.transposed, **options}
        given = Call(x, ids, scores, self.master if w is None else w, num_tokens_device)
        dy = torch.zeros_like(x) if dy is None else dy
        return layer.backward(given, dy, state, GradRequest(Needs(*needs), **options))


@pytest.fixture
def trained(precision, monkeypatch):
    return Trained(precision, monkeypatch)


def at(region, base, table):
    return base + table[region].offset


def rows_of(launch):
    return dict(zip(abi.GEMMS, launch.gemm, strict=False))


def map_of(tensor_map):
    return maps()[bytes(tensor_map)[127] - 1]


def test_a_step_launches_both_kernels_with_their_arguments(trained):
    layer, transposed = (
        trained.layer(reserve_sms=20, timeout_s=2),
        trained.transposed or trained.master,
    )
    layer.prepare(trained.weights)
    assert trained.loaded == [f"{trained.precision}-swiglu"]
    count = torch.ones(1, dtype=torch.int32)
    call = trained.forward(layer, num_tokens_device=count)
    x, ids, scores, y, state = call
    one, plan, s = argument("train"), layer.plan, state.data_ptr()
    table = plan.train_state
    assert (
        one.rows_in,
        one.rows_out,
        one.topk_ids,
        one.topk_weights,
        one.num_tokens_device,
    ) == tuple(t.data_ptr() for t in (x, y, ids, scores, count))
    assert (one.num_tokens, one.timeout_ns) == (5, 2_000_000_000)
    assert (one.gemm[0].b.words[0], one.gemm[0].bias) == (
        trained.weights.w13.data_ptr(),
        trained.weights.b13.data_ptr(),
    )
    assert (one.state.header, one.state.tokens) == (s, at("tokens", s, table))
    gate = at("gu", s, table)
    assert [gu.words[0] for gu in one.gu[:2]] == [gate, gate + 144 * 2]
    assert (one.chunk_prefix, one.epoch) == (
        at("chunk_prefix", s, table),
        layer.window.epoch_cell.data_ptr(),
    )
    assert (state.dtype, state.shape) == (torch.uint8, (layer.state_bytes,))
    assert config()["grid"] == [112, 1, 1]

    dy = torch.zeros_like(x)
    gradients = trained.backward(layer, call, dy=dy, num_tokens_device=count)
    two, work = argument("backward"), layer._training.workspace.data_ptr()
    t, rows, (dx, d_scores, dw13, dw2, db13, db2) = two.own, rows_of(two), gradients
    assert (
        two.rows_in,
        t.x,
        two.rows_out,
        two.topk_ids,
        t.d_topk_weights,
        two.num_tokens_device,
    ) == tuple(given.data_ptr() for given in (dy, x, dx, ids, d_scores, count))
    assert [row.b.words[0] for row in two.gemm[:2]] == [
        transposed.w2.data_ptr(),
        transposed.w13.data_ptr(),
    ]
    biased = trained.transposed.forward if trained.transposed else trained.master
    assert (rows["recompute"].bias, t.b2) == (biased.b13.data_ptr(), biased.b2.data_ptr())
    assert (two.state.header, two.state.tokens) == (s, at("tokens", s, table))
    assert (two.gu[0].words[0], t.x_rows) == (gate, at("x_rows", work, plan.backward))
    assert [rows[n].out[0].words[0] for n in ("dw13", "dw2")] == [dw13.data_ptr(), dw2.data_ptr()]
    assert [rows[n].bias for n in ("dw13", "dw2")] == [db13.data_ptr(), db2.data_ptr()]
    assert (rows["dw13"].m, rows["dw2"].m, t.dw_bytes, t.accumulate) == (144, 272, 2, 0)
    assert (two.num_tokens, two.epoch, two.config_hash) == (5, one.epoch, one.config_hash)
    assert not dx.any()  # zeros behind the count
    assert not d_scores.any()
    assert [tuple(g.shape) for g in gradients] == [
        (5, 272),
        (5, 3),
        (7, 288, 272),
        (7, 272, 144),
        (7, 288),
        (7, 272),
    ]
    assert [g.dtype for g in gradients] == [torch.bfloat16, torch.float32, *BF16_TYPES]
    assert trained.loaded[1:] == [
        f"{kind}-{trained.precision}-swiglu" for kind in ("train", "backward")
    ]
    trained.forward(layer)
    trained.backward(layer, call)
    assert launched() == 4


def test_both_kernels_are_compiled_at_the_same_time(trained, monkeypatch):
    """Either compilation waits here until the other one runs; loading waits for both."""
    both, compiled, at_loading, made = threading.Barrier(2, timeout=20), [], [], kernel()

    def compiling(variant):
        both.wait()
        compiled.append(str(variant))

    def loading(variant, device):
        at_loading.append(len(compiled))
        return made

    layer = trained.layer()
    layer.prepare(trained.weights)
    monkeypatch.setattr(module, "compile_variant", compiling)
    monkeypatch.setattr(module, "load_kernel", loading)
    call = trained.forward(layer)
    trained.backward(layer, call)
    trained.forward(layer)
    assert sorted(compiled) == [
        f"{kind}-{trained.precision}-swiglu" for kind in ("backward", "train")
    ]
    assert at_loading == [2, 2]


def test_threads_without_a_context_encode_maps(trained):
    """Autograd's thread has none until something of torch runs in it: both directions, their first and next calls."""
    layer = trained.layer()
    layer.prepare(trained.weights)
    trained.forward(layer)
    for tokens, total in ((5, 4), (6, 7)):
        number("no_context").value = 1
        call = trained.forward(layer, tokens)
        number("no_context").value = 1
        trained.backward(layer, call)
        number("no_context").value = 1
        forward(layer, *tensors(tokens), driver_stub.weights_of(trained.problem))
        assert launched() == total


def test_weight_gradients_alone_are_said_to_the_launch_and_no_longer_to_the_next(trained):
    layer = trained.layer()
    call = trained.forward(layer)
    for only in (True, False):
        gradients = trained.backward(
            layer, call, needs=[not only] * 2 + [True] * 4, only_weights=only
        )
        assert [g is None for g in gradients] == [only] * 2 + [False] * 4
        assert argument("backward").own.only_weights == only
    error = refusal(trained.backward, layer, call, only_weights=True, of=ArgumentError)
    assert "no dx and no d_topk_weights with only_weights" in str(error)


def test_rows_that_are_kept_and_the_launch_of_several_passes(trained):
    """Backward's rows go to memory of the pass, and back to the workspace; one launch reads all that were kept."""
    layer, master, scaled = (
        trained.layer(reserve_sms=20),
        trained.master,
        trained.precision == "fp8",
    )
    call = trained.forward(layer)
    plan, window = layer.plan, layer.window
    state = plan.train_state["header"].view(call[-1]).fill_(5)
    prefix = plan.train_state["chunk_prefix"].view(call[-1]).fill_(6)
    layer.prepare_stash()
    assert trained.loaded.pop() == "grouped-kept-2"
    trained.loaded.clear()
    passes = [layer.new_stash() for _ in range(3)]
    workspace = window.workspace(plan).data_ptr()
    for kept in [*passes, None]:
        gradients = trained.backward(layer, call, needs=[True] * 2 + [not kept] * 4, stash=kept)
        assert [g is None for g in gradients] == [False] * 2 + [bool(kept)] * 4
        two, table = argument("backward"), plan.stash if kept else plan.backward
        base = kept.memory.data_ptr() if kept else layer._training.workspace.data_ptr()
        rows = rows_of(two)
        dy, hs = two.x_pool, rows["dw2"].b.words[0]
        if "dy_rows" in table:
            dy = at("dy_rows", base, table)
        if "hs" in table:
            hs = at("hs", base, table)
        assert (two.own.x_rows, two.own.row_weight) == (
            at("x_rows", base, table),
            at("row_weight", base, table),
        )
        dgu = at("dgu", base, table)
        assert rows["gemm1"].out[0].words[0] == rows["dw13"].a[0].words[0] == dgu
        assert rows["recompute"].out[1].words[0] == rows["dw13"].a[1].words[0] == dgu + 144 * 2
        assert (rows["dw13"].b.words[0], rows["dw2"].a[0].words[0]) == (two.own.x_rows, dy)
        assert two.hs.words[0] == rows["dw2"].b.words[0] == hs
        assert not scaled or two.own.dy_rows == dy
        assert (two.x_pool == at("x_pool", workspace, plan.workspace)) == (scaled or not kept)
        assert rows["gemm1"].a[0].words[0] == two.x_pool
        assert (rows["dw13"].m, rows["dw2"].m) == (144, 272)
        assert (rows["dw13"].n, rows["dw2"].n) == ((0, 0) if kept else (272, 144))
        for name, given in (("header", state), ("chunk_prefix", prefix)) if kept else ():
            assert torch.equal(plan.stash[name].view(kept.memory), given)
    into = {"w13": torch.zeros_like(master.w13, dtype=torch.float32)}
    wanted = GradRequest(Needs(False, False, True, False, True, True), into)
    gradients = layer.weight_gradients(master, passes, wanted)
    assert [g is None for g in gradients] == [True] * 4 + [False] * 2
    three = argument("stashed_weights")
    own, (dw13, dw2) = three.own, three.gemm
    assert trained.loaded == []
    assert (own.num_passes, own.dw_bytes, own.accumulate) == (3, 4, 1)
    assert (dw13.m, dw13.n, dw2.m, dw2.n) == (144, 272, 272, 64)  # for a bias alone: few
    assert dw13.out[0].words[0] == into["w13"].data_ptr()
    assert (dw13.bias, dw2.bias) == (gradients[4].data_ptr(), gradients[5].data_ptr())
    assert (three.fault, three.pool_rows) == (window.fault_memory.data_ptr(), plan.pool_rows)
    assert three.fault_ticket == at("fault_ticket", workspace, plan.workspace)
    assert three.abort == at("window_abort", window.bases[0], plan.window)
    assert (three.num_local_experts, three.num_ranks, three.max_chunks) == (7, 1, 3)
    assert (config()["grid"], config()["attributes"]) == ([112, 1, 1], {})
    for one, kept in zip(own.passes, passes, strict=False):
        base = kept.memory.data_ptr()
        maps_of = {"dgu": one.dgu[0], "dy_rows": one.dy, "x_rows": one.x, "hs": one.hs}
        for name, found in maps_of.items():
            assert found.words[0] == at(name, base, plan.stash)
        assert one.dgu[1].words[0] == one.dgu[0].words[0] + 144 * 2
        for name in ("row_weight", "header", "chunk_prefix"):
            assert getattr(one, name) == at(name, base, plan.stash)
    window.resets += 1
    error = refusal(layer.weight_gradients, master, passes, wanted)
    assert "reset() was called since 3 of 3 backward passes" in str(error)


def test_gradients_have_their_masters_layout_and_only_what_is_needed_is_made(trained):
    layer, master = trained.layer(), trained.master
    w13 = torch.zeros(7, 144, 2, 272, dtype=torch.bfloat16).transpose(
        1, 2
    )  # gate and up interleaved
    w2 = torch.zeros(7, 272, 160, dtype=torch.bfloat16)[:, :, :144]
    b13 = torch.zeros(7, 2, 144).transpose(1, 2).contiguous().transpose(1, 2)
    call = trained.forward(layer)
    gradients = trained.backward(layer, call, w=ExpertWeights(w13, w2, b13, master.b2))
    strides = [g.stride() for g in gradients[2:5]]
    assert strides == [(144 * 544, 272, 544, 1), (272 * 144, 144, 1), (288, 144, 1)]
    dw13 = argument("backward").gemm[2].out[0]
    assert dw13.words[0] == gradients[2].data_ptr()
    assert map_of(dw13).strides[:3] == [1088, 544, 144 * 1088]
    partly = trained.backward(layer, call, needs=[True, False, False, True, False, False])
    assert [g is None for g in partly] == [False, True, True, False, True, True]
    dw13, dw2 = argument("backward").gemm[2:4]
    assert [dw13.m, dw2.m, dw13.bias, dw2.bias] == [0, 272, None, None]
    assert trained.backward(layer, call, needs=[False] * 6) == (None,) * 6
    two = argument("backward")
    assert not any(row.m for row in two.gemm)
    assert two.rows_out


@FP8
def test_fp32_masters_get_the_launchs_own_gradients_in_every_call(trained):
    """Also in a call like the last one, whose targets are made without a look at the masters."""
    layer = trained.layer()
    masters = ExpertWeights(**{n: t.float() for n, t in trained.master.named().items()})
    x, ids, scores, _, state = trained.forward(layer)
    call = Call(x, ids, scores, masters, known=object())
    for _ in range(3):
        wanted = GradRequest(transposed=trained.transposed)
        found = layer.backward(call, torch.zeros_like(x), state, wanted)
        outs = [row.out[0].words[0] for row in argument("backward").gemm[2:4]]
        assert outs == [found.w13.data_ptr(), found.w2.data_ptr()]
        assert found.w13.dtype == found.w2.dtype == torch.float32


ADDED = {  # gradients that are returned, dw_bytes of the launch, and what it adds to by itself
    "all": ([False] * 4, 4, [True] * 4),
    "bf16": ([False, False, True, True], 2, [True, True, False, False]),
    "one": ([False, True, True, True], 4, [True, False, False, False]),
    "mixed": ([False, False, True, True], 4, [True, False, False, False]),
    "bias": ([True, True, True, False], 2, [False] * 4),
    "strided": ([True, False, True, True], 4, [False] * 4),
}


@pytest.mark.parametrize("case", ADDED)
def test_gradients_are_added_where_the_caller_says(trained, case):
    # The launch computes nothing: what was there stays, what the kernel cannot add to gets zeros added.
    names = ("w13", "w2", "b13", "b2")

    def ones(name, dtype=torch.float32):
        return torch.ones(getattr(trained.master, name).shape, dtype=dtype)

    into = {
        "all": {n: ones(n) for n in names},
        "bf16": {n: ones(n, torch.bfloat16) for n in names[:2]},
        "one": {"w13": ones("w13")},
        "mixed": {"w13": ones("w13"), "w2": ones("w2", torch.bfloat16)},
        "bias": {"b2": ones("b2", torch.bfloat16)},
        "strided": {"w2": torch.ones(7, 144, 272).transpose(1, 2)},
    }[case]
    returned, dw_bytes, direct = ADDED[case]
    layer = trained.layer()
    gradients = trained.backward(layer, trained.forward(layer), into=into)[2:]
    launch = argument("backward")
    dw13, dw2 = launch.gemm[2:4]
    assert [g is not None for g in gradients] == returned
    assert (bool(dw13.m), bool(dw2.m), launch.own.dw_bytes, launch.own.accumulate) == (
        True,
        True,
        dw_bytes,
        1,
    )
    places = dw13.out[0].words[0], dw2.out[0].words[0], dw13.bias, dw2.bias
    told = [
        n in into and into[n].data_ptr() == place for n, place in zip(names, places, strict=True)
    ]
    assert told == direct
    assert all((t == 1).all() for t in into.values())
    for gradient, dtype in zip(gradients, BF16_TYPES, strict=True):
        assert gradient is None or not gradient.any()
        assert gradient is None or gradient.dtype == dtype  # the master's, whatever the launch had


def test_bad_backward_calls_are_refused_by_name_before_the_launch(trained):
    layer, master, bf16 = trained.layer(), trained.master, torch.bfloat16
    call = x, ids, scores, y, state = trained.forward(layer)
    bytes_off = torch.zeros(layer.state_bytes + 8, dtype=torch.uint8)[8:]
    cases = {
        "dy.dtype is torch.float32": {"dy": torch.zeros(5, 272)},
        "dy.shape is [4, 272]": {"dy": torch.zeros(4, 272, dtype=bf16)},
        "dy.stride()": {"dy": torch.zeros(272, 5, dtype=bf16).t()},
        "dy is 0x": {"dy": torch.zeros(5 * 272 + 1, dtype=bf16)[1:].view(5, 272)},
        "dy.device is meta": {"dy": torch.zeros(5, 272, dtype=bf16, device="meta")},
        "state.shape": {"call": (x, ids, scores, y, state[:-16])},
        "state.dtype": {"call": (x, ids, scores, y, state.view(torch.int32))},
        "state is 0x": {"call": (x, ids, scores, y, bytes_off)},
        "topk_ids.shape": {"call": (x, ids[:3], scores, y, state)},
        "x.shape[0] is 71": {"call": (torch.zeros(71, 272, dtype=bf16), ids, scores, y, state)},
        "weights.w13.dtype is torch.float8_e4m3fn": {
            "w": driver_stub.weights_of(replace(trained.problem, precision="fp8"))
        },
        "weights.w2.shape": {"w": replace(master, w2=master.w2[:, :, :128])},
        "num_tokens_device.dtype is torch.int64": {
            "num_tokens_device": torch.ones(1, dtype=torch.int64)
        },
    }
    for text, how in cases.items():
        assert text in str(
            refusal(trained.backward, layer, **{"call": call, **how}, of=ArgumentError)
        )
    trained.backward(layer, call)
    error = refusal(trained.backward, trained.layer(), call, of=ArgumentError)
    assert str(error) == "state is given, expected one that a forward of this layer has kept"


def test_weights_refused_halfway_are_not_taken_for_those_before(trained):
    layer, weights, transposed = trained.layer(), trained.weights, trained.transposed
    call = trained.forward(layer)

    def crooked(w):  # w2 where no tensor map can begin
        raw = torch.zeros(w.w2.numel() + 1, dtype=w.w2.dtype)
        shifted = raw[1:].view(w.w2.shape)
        return replace(transposed if w is transposed else driver_stub.copies(w), w2=shifted)

    for kind, good, first, launch in (
        ("forward", weights, 0, lambda w: forward(layer, *tensors(), w)),
        ("train", weights, 0, lambda w: layer.forward(Call(*tensors(), w), keep=True)),
        (
            *("backward", transposed or trained.master, 1),
            lambda w: trained.backward(layer, call, **{"transposed" if transposed else "w": w}),
        ),
    ):
        launch(good)
        assert "16-byte aligned" in str(refusal(launch, crooked(good), of=ArgumentError))
        launch(good)
        rows = argument(kind).gemm
        assert (rows[first].b.words[0], rows[1 - first].b.words[0]) == (
            good.w13.data_ptr(),
            good.w2.data_ptr(),
        )


@FP8
def test_a_call_that_ran_out_of_memory_may_be_repeated(trained, monkeypatch):
    """The second time it is known: only its addresses are written."""
    layer, known = trained.layer(), object()
    trained.forward(layer)

    def full(*_):
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(layer._training.train, "_empty", full)
        with pytest.raises(torch.OutOfMemoryError):
            trained.forward(layer, 3, known=known)
    trained.forward(layer, 3, known=known)
    assert argument("train").num_tokens == 3


class Apart(Group):
    """A group whose other rank could not make its kernel, while `failing`."""

    failing = False

    def gather(self, mark, value):
        if self.failing:
            raise PeerFault("rank 1 raised CompileError: no")
        return {0: value}


@FP8
def test_nothing_is_made_in_a_capture_nor_on_one_rank_alone(trained, monkeypatch):
    group = Apart()
    layer = trained.layer(group=group)
    layer.prepare(trained.weights)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        error = refusal(trained.forward, layer)
    assert "run one step, forward and backward, before CUDA graph capture" in str(error)
    assert (len(trained.loaded), len(layer.window._workspaces)) == (1, 1)
    group.failing = True
    for _ in range(2):
        error = refusal(trained.forward, layer)
        assert str(error) == "rank 1 raised CompileError: no"
    group.failing = False
    trained.forward(layer)
    trained.forward(layer)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        patch.setattr(launches, "_capture_id", lambda handle: 9)
        trained.backward(layer, trained.forward(layer))
    assert launched() == 4
    twin = MegaBackend(trained.problem, window=layer.window)
    other = MegaBackend(trained.problem, window=layer.window, pool_rows=4096)
    for each in (twin, other):
        trained.forward(each)
    assert layer._training.workspace is twin._training.workspace
    assert len(layer.window._workspaces) == 4
    cells = layer.plan.backward["grads_ready"].view(layer._training.workspace)
    cells.fill_(3)
    layer.reset()
    assert int(cells) == 0


def test_statistics_and_intermediates_are_of_the_last_call(trained):
    layer, given = trained.layer(), (*tensors(), trained.weights)

    def fill(prefix, first):
        prefix.zero_()
        prefix[0, 1:] = first

    def last():
        return int(layer.statistics().tokens_per_expert[0]), set(layer.intermediates())

    forward(layer, *given)
    layer.plan.window["window_routes"].view(layer.window.memory)[:, :, 0] = 5
    fill(layer.plan.views(layer.window.workspace(layer.plan))["chunk_prefix"], 7)
    first, stages = last()
    assert first == 7
    call = trained.forward(layer)
    fill(layer.plan.train_state["chunk_prefix"].view(call[4]), 11)
    assert last() == (11, {*stages, "gate_up"})
    trained.backward(layer, call)
    rows = {"dy_rows", "dgu", "hs", "d_s", "dx_rows", "x_rows", "row_weight", "route_rows"}
    del call
    assert last() == (11, rows | {"partials"})
    trained.forward(layer)
    with pytest.raises(MegaMoEError, match="state of the call was freed"):
        layer.statistics()
    forward(layer, *given)
    assert last() == (11, stages)


def test_faults_of_a_backward_are_raised_and_reset(trained):
    layer = trained.layer(timeout_s=2)
    call = trained.forward(layer)
    fault = layer.window.fault
    fault.peer, fault.expected, fault.seen = 0, 4, 9
    fault.edge = int(abi.Edge.state)
    error = refusal(trained.backward, layer, call, of=RankMismatch)
    assert "a state that no forward of this layer completed" in str(error)
    refusal(trained.forward, layer, of=WindowBroken)
    refusal(trained.backward, layer, call, of=WindowBroken)
    layer.reset()
    trained.backward(layer, call)
    assert launched() == 2


@FP8
def test_launches_that_train_keep_the_order_of_streams(trained, streams):
    layer, calls = trained.layer(), []
    assert streams(lambda: calls.append(trained.forward(layer)), 1) == []
    assert streams(lambda: trained.backward(layer, *calls), 2) == [1]
    assert streams(lambda: forward(layer, *tensors(), trained.weights), 2) == []
