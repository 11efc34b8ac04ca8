"""Launching without a GPU: tests/stub/libcuda.c stands in for the driver and records what it is told."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from driver_stub import (
    PROBLEM,
    Stream,
    argument,
    backend_of,
    config,
    copies,
    forward,
    kernel,
    launched,
    maps,
    number,
    refusal,
    tensors,
    weights_of,
)
from torch.multiprocessing.reductions import StorageWeakRef

from megamoe import Layer
from megamoe.backends import select
from megamoe.backends.call import Call, GradRequest, Needs
from megamoe.backends.mega import backend as mega
from megamoe.core.config import Problem
from megamoe.core.errors import (
    ArgumentError,
    ConfigError,
    MegaMoEError,
    NotCoResident,
    PeerFault,
    ProtocolTimeout,
    WindowBroken,
)
from megamoe.formats.quantized import QuantizedRows
from megamoe.formats.weights import ExpertWeights
from megamoe.jit import abi, module, paths
from megamoe.jit.tensormap import encode
from megamoe.window.window import Window

pytestmark = pytest.mark.stub
COOPERATIVE, OVERLAPPED = 2, 6  # CU_LAUNCH_ATTRIBUTE_COOPERATIVE, PROGRAMMATIC_STREAM_SERIALIZATION


@pytest.fixture
def weights():
    return weights_of()


def call(backend, weights, tokens=5, **options):
    x, ids, scores = tensors(tokens)
    return x, forward(backend, x, ids, scores, weights, **options)


def addresses(w):
    return [t.data_ptr() for t in (w.w13, w.w2, w.w13_scale, w.w2_scale)]


def given_weights():
    one, two = argument().gemm
    return [one.b.words[0], two.b.words[0], one.b_scale, two.b_scale]


def test_launch_passes_the_argument_and_the_attributes():
    args = abi.aligned(abi.LAUNCHES["forward"])
    args.num_tokens, args.act_alpha, args.window[3] = 77, 0.5, 1 << 45
    for pdl, cooperative, attributes in (
        (False, True, {COOPERATIVE: 1}),
        (True, True, {COOPERATIVE: 1, OVERLAPPED: 1}),
        (False, False, {}),
    ):
        launcher = module.Launcher(kernel(), 130, args, cooperative=cooperative, pdl=pdl)
        launcher.launch(0x7000)
        launcher.launch(0x7100)
        assert config() == {
            "grid": [130, 1, 1],
            "block": [512, 1, 1],
            "smem": number("max_smem").value,
            "stream": 0x7100,
            "attributes": attributes,
        }
    got = argument()
    args.num_tokens = 78  # after the launch: the driver has its copy
    assert (got.num_tokens, got.act_alpha, got.window[3]) == (77, 0.5, 1 << 45)
    assert (launched(), number("max_smem").value) == (6, 200000)


def test_a_thread_without_a_context_launches_once():
    launcher = module.Launcher(kernel(), 130, abi.aligned(abi.LAUNCHES["forward"]))
    number("no_context").value = 1
    launcher.launch(0x7000)
    assert launched() == 1
    number("max_smem").value = 0
    with pytest.raises(MegaMoEError, match="INVALID_VALUE"):
        launcher.launch(0x7000)


def test_too_large_grids_are_refused():
    made = kernel()
    made.check_resident(132)
    with pytest.raises(NotCoResident, match="133 CTAs, 132 fit"):
        made.check_resident(133)
    with pytest.raises(NotCoResident, match="300000 bytes of shared memory"):
        module.Kernel(b"cubin", "k", 0, 300000)
    number("blocks_per_sm").value = 0
    with pytest.raises(NotCoResident):
        made.check_resident(1)


def test_driver_errors_become_exceptions():
    with pytest.raises(MegaMoEError, match="INVALID_VALUE.*the stub refuses"):
        encode(4096 + 8, (64, 64), (128,), (64, 64), 2)


def test_tensor_maps():
    strides = 7168, 7168 * 2048, 7168 * 4096
    given = (1 << 20, (7168, 2048, 2, 64), strides, (128, 128, 1, 1), 1)
    first, again, second = (
        encode(*given),
        encode(*given),
        encode(1 << 21, (64, 256), (128,), (64, 64), 2),
    )
    assert first == again
    assert [(len(m), m[127]) for m in (first, second)] == [(128, 1), (128, 2)]
    w13, pool = maps()  # the second call came from the cache
    assert (w13.type, w13.rank) == (0, 4)  # uint8
    assert w13.dims[:4] == [7168, 2048, 2, 64]
    assert w13.strides[:3] == list(strides)
    assert w13.box[:4] == [128, 128, 1, 1]
    assert (pool.type, pool.rank, pool.dims[:2]) == (9, 2, [64, 256])  # bfloat16
    for tensor_map in (w13, pool):  # 128-byte swizzle, 256-byte promotion, zeros outside
        assert (tensor_map.swizzle, tensor_map.promotion, tensor_map.fill) == (3, 3, 0)


def test_backend_launches_what_the_call_says(weights):
    backend = backend_of(reserve_sms=20, timeout_s=2, profile=True)
    backend.prepare(weights)
    count = torch.ones(1, dtype=torch.int32)
    x, y = call(backend, weights, num_tokens_device=count)
    got, seen = argument(), config()
    assert seen["grid"] == [112, 1, 1]
    assert (seen["attributes"], seen["stream"]) == ({COOPERATIVE: 1}, Stream.cuda_stream)
    assert y.shape == (5, 272)
    assert len(maps()) == 7
    assert (got.rows_in, got.rows_out, got.num_tokens_device) == tuple(
        t.data_ptr() for t in (x, y, count)
    )
    assert (got.epoch, got.fault) == (
        backend.window.epoch_cell.data_ptr(),
        backend.window.fault_memory.data_ptr(),
    )
    assert (got.profile, got.window[0]) == (backend.profile.data_ptr(), backend.window.bases[0])
    assert given_weights() == addresses(weights)
    assert bytes(got.gemm[0].out) == bytes(got.gemm[1].a)
    assert got.gemm[0].a[0].words[0] == got.x_pool
    assert (got.num_tokens, got.ids_are_int64, got.timeout_ns) == (5, 1, 2_000_000_000)
    out = torch.zeros(0, 272, dtype=torch.bfloat16)
    assert call(backend, weights, tokens=0, out=out)[1] is out
    assert (argument().num_tokens, len(maps())) == (0, 7)
    moved = copies(weights)
    call(backend, moved)
    assert given_weights() == addresses(moved)
    assert len(maps()) == 7 + 2
    backend.close()
    backend.close()


def test_calls_of_many_tokens_take_the_kernel_with_panels(monkeypatch):
    """All kernels have one argument block; layers of few tokens and other precisions have less."""
    kernels, asked, built = [kernel(), kernel()], [], []
    monkeypatch.setattr(module, "compile_variant", lambda variant: built.append(str(variant)))

    def load(variant, device):
        asked.append(str(variant))
        return kernels[variant.panels]

    monkeypatch.setattr(module, "load_kernel", load)

    def panels(max_tokens, precision, *tokens):
        problem, found = Problem(288, 160, 7, 3, max_tokens=max_tokens, precision=precision), []
        backend, made = backend_of(problem), weights_of(problem)
        for t in tokens:
            x, ids = torch.zeros(t, 288, dtype=torch.bfloat16), torch.zeros(t, 3, dtype=torch.int64)
            y = forward(backend, x, ids, torch.zeros(t, 3), made)
            assert argument().num_tokens == t == len(y)
            expanded = argument("packed").expanded
            found.append(backend._forward.launcher.kernel is kernels[1])
            assert ((expanded.rooms, expanded.above) == (7, 7 * 640)) == (
                (precision, max_tokens) == ("fp8xmxfp4", 1600)
            )
        backend.close()
        return found

    # an even load of 1494 tokens: 640.3 rows of each of seven experts
    many = panels(1600, "fp8xmxfp4", 5, 1493, 1494, 1600, 5, 1600)
    assert many == [False, False, True, True, False, True]
    for max_tokens, precision in ((1493, "fp8xmxfp4"), (1600, "fp8_channel"), (1600, "bf16xmxfp4")):
        assert panels(max_tokens, precision, max_tokens) == [False]
    every = ["few-fp8xmxfp4-swiglu", "fp8xmxfp4-swiglu", "fp8xmxfp4-swiglu-panels"]
    assert asked == [*every, *every[:2], "fp8_channel-swiglu", "bf16xmxfp4-swiglu"]
    # at the same time; what is alone is compiled where it is loaded
    assert sorted(built) == sorted([*every, *every[:2]])


@pytest.mark.parametrize(
    ("max_tokens", "options", "expected"),
    [
        (64, {}, ["few-fp8-swiglu"]),
        (70, {}, ["few-fp8-swiglu", "fp8-swiglu"]),
        (70, {"few": False}, ["fp8-swiglu"]),
        (70, {"profile": True}, ["few-fp8-swiglu-profile", "fp8-swiglu-profile"]),
    ],
)
def test_calls_of_few_tokens_take_their_kernel(monkeypatch, max_tokens, options, expected):
    """Over the argument block of the other one, which is not compiled where no call can have more tokens."""
    problem = Problem(288, 160, 7, 3, max_tokens=max_tokens, precision="fp8")
    kernels = {name: kernel() for name in expected}
    loaded, built = [], []
    monkeypatch.setattr(module, "compile_variant", lambda variant: built.append(str(variant)))

    def load(variant, device):
        loaded.append(str(variant))
        return kernels[str(variant)]

    monkeypatch.setattr(module, "load_kernel", load)
    backend, made = backend_of(problem, **options), weights_of(problem)
    for tokens in (65, 64, 0, 70):
        if tokens > max_tokens:
            continue
        x, ids = torch.zeros(tokens, 288, dtype=torch.bfloat16), torch.zeros(tokens, 3).long()
        forward(backend, x, ids, torch.zeros(tokens, 3), made)
        assert argument().num_tokens == tokens
        name = expected[0 if tokens <= 64 else -1]
        assert backend._forward.launcher.kernel is kernels[name]
        assert backend.window.last_launch == (0, "few" if "few" in name else "forward")
        assert backend.statistics().tokens_per_expert.shape == (7,)
    assert loaded == expected
    assert sorted(built) == (expected if len(expected) > 1 else [])
    backend.close()


def test_weights_that_move_are_followed(weights):
    backend = backend_of()

    def follows(w, known=None):
        call(backend, w, known=known)
        return given_weights() == addresses(w)

    first, plain = ExpertWeights(**weights.named()), copies(weights)
    one, two = object(), object()  # as a layer has one for each call that it knows
    for w in (first, first, plain, first, plain):
        assert follows(w)
    for w, known in (
        *((first, one), (first, one), (plain, two), (first, one), (plain, None), (first, one)),
        *((plain, two), (plain, two), (first, None), (plain, two)),
    ):
        assert follows(w, known)
    backend.prepare(first)
    assert follows(plain, two)
    plain.w2.data = plain.w2.clone()
    assert follows(plain)
    plain.w13 = plain.w13.clone()
    assert follows(plain)
    wide = torch.zeros(7, 272, 160, dtype=plain.w2.dtype)
    dense = torch.as_strided(wide, (7, 272, 144), (144 * 272, 144, 1))  # the same address
    for w2, stride in (
        (dense, 144),
        (wide[:, :, :144], 160),
        (dense, 144),
    ):  # the last map comes from the cache
        plain.w2.data = w2
        assert follows(plain)
        assert maps()[bytes(argument().gemm[1].b)[127] - 1].strides[0] == stride


def test_a_launch_keeps_no_weights_alive():
    """Else those of a model that was moved off the GPU would stay there; biases are copied, and do."""
    plain = replace(PROBLEM, precision="bf16", bias=True)
    given, backend = weights_of(plain), backend_of(plain)
    call(backend, given)
    kept = {n: StorageWeakRef(t.untyped_storage()) for n, t in given.named().items()}
    del given
    assert [n for n, storage in kept.items() if storage.expired()] == ["w13", "w2"]


class Called:
    """A layer of backend="mega", and whether the kernel was told what each of its calls is."""

    def __init__(self, monkeypatch):
        self.checked, check = 0, Layer._checked

        def counted(*arguments):
            self.checked += 1
            return check(*arguments)

        monkeypatch.setattr(Layer, "_checked", counted)
        monkeypatch.setattr(select, "why_not_mega", lambda *_: None)
        self.layer = Layer(PROBLEM, backend="mega")

    @torch.no_grad()
    def __call__(
        self, w, tokens=5, dtype=torch.int64, lead=(), out=False, x=None, scale=None, count=None
    ):
        x = torch.zeros(*lead, tokens, 272, dtype=torch.bfloat16) if x is None else x
        ids, scores = torch.zeros(*lead, tokens, 3, dtype=dtype), torch.zeros(*lead, tokens, 3)
        y = torch.zeros(*lead, tokens, 272, dtype=torch.bfloat16) if out else None
        made = self.layer(x, ids, scores, w, out=y, x_scale=scale, num_tokens_device=count)
        got = argument()
        assert (got.num_tokens, got.ids_are_int64) == (tokens, dtype == torch.int64)
        assert (made.shape, made.dtype) == (x.shape, torch.bfloat16)
        assert y is None or made is y
        told = (
            got.rows_in,
            got.rows_out,
            got.topk_ids,
            got.topk_weights,
            got.in_scale,
            got.num_tokens_device,
        )
        for address, t in zip(told, (x, made, ids, scores, scale, count), strict=True):
            assert (address or 0) == (0 if t is None else t.data_ptr())
        assert given_weights() == addresses(self.layer._runtime.weights(w))


def test_known_calls_of_a_layer_are_told_apart(monkeypatch, weights):
    """Calls that were checked, in turn: what the kernel has of the last one is filled anew, whatever differs."""
    layer, (first, second, third) = Called(monkeypatch), [copies(weights) for _ in range(3)]
    count, q = torch.ones(1, dtype=torch.int32), torch.zeros(1, 5, 272).to(torch.float8_e4m3fn)
    calls = [
        {"w": first},
        {"w": first, "tokens": 6, "dtype": torch.int32},
        {"w": first, "tokens": 0},
        {"w": second, "lead": (1, 1)},
        {"w": first, "lead": (1, 1, 1), "dtype": torch.int32},
        {"w": second, "lead": (1,) * 4, "count": count},
        {"w": second, "lead": (1,) * 5, "out": True},
        {"w": third, "tokens": 2},
        {"w": first, "x": q, "scale": torch.ones(1, 5, 3), "lead": (1,)},
    ]
    for each in calls:
        layer(**each)
    assert layer.checked == len(calls)
    for before, after in product(calls, calls):
        for each in (before, after, after):
            layer(**each)
    backend = layer.layer._runtime.backend
    for other, each in product(
        (first, second, third), calls
    ):  # what does not go by way of a known call
        for between in (backend.prepare, lambda w: call(backend, w, tokens=7), layer.layer.prepare):
            layer(**each)
            between(other)
            layer(**each)
    assert layer.checked == len(calls), "a call that is known was checked again, or is none"


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_weights_of_known_calls_of_a_layer_that_move_are_followed(monkeypatch, precision):
    """e4m3 weights, and masters whose copies the layer makes: other tensors, the same with other data, one of them."""
    layer, given = Called(monkeypatch), weights_of(replace(PROBLEM, precision=precision))

    def look(w):
        for _ in range(3):  # checked, and then known
            layer(w)

    look(given)
    look(copies(given))
    look(given)
    for name in given.named():
        t = getattr(given, name)
        t.data = t.data.clone()
        look(given)
        setattr(given, name, t.clone())
        look(given)
        look(replace(given, **{name: t.clone()}))
        look(given)


def test_biases_that_move_beside_the_same_matrices_are_followed():
    biased = Problem(272, 144, 7, 3, max_tokens=70, bias=True)
    backend, w = backend_of(biased), weights_of(biased)
    for name in ("b13", "b2"):
        call(backend, w)
        w = replace(w, **{name: getattr(w, name).clone()})
        call(backend, w)
        assert [gemm.bias for gemm in argument().gemm] == [w.b13.data_ptr(), w.b2.data_ptr()]


def test_every_call_is_checked_where_torch_has_no_guards(monkeypatch, weights):
    monkeypatch.setattr(torch._C._dynamo.guards, "TensorGuards", None)
    layer = Called(monkeypatch)
    for _ in range(3):
        layer(weights)
    assert layer.checked == 3


def test_calls_of_other_shapes_and_types_are_noticed(weights):
    backend = backend_of()
    for tokens, dtype in (
        (5, torch.int64),
        (5, torch.int32),
        (6, torch.int32),
        (0, torch.int32),
    ) * 2:
        x, ids, scores = tensors(tokens)
        forward(backend, x, ids.to(dtype), scores, weights)
        assert (argument().num_tokens, argument().ids_are_int64) == (tokens, dtype == torch.int64)
    x, ids, scores = tensors(6)
    forward(backend, x, ids.int(), scores, weights)
    for bad in (
        {"x": x.float()},
        {"x": torch.zeros(272, 6, dtype=torch.bfloat16).t()},
        {"x": x[:, :256]},
        {"topk_ids": ids.short()},
        {"topk_ids": ids[:5]},
        {"topk_weights": torch.zeros(3, 6).t()},
        {"topk_weights": scores.to("meta")[:, :2]},
    ):
        given = {"x": x, "topk_ids": ids.int(), "topk_weights": scores, **bad}
        refusal(forward, backend, **given, weights=weights, of=ArgumentError)
    forward(backend, x, ids.int(), scores, weights)
    assert argument().num_tokens == 6


def test_a_quantized_x_is_never_taken_for_another(weights):
    """Its scales go with its call, and bf16 behind it is looked at anew: the kernel would read twice as much."""
    backend, (x, ids, scores) = backend_of(), tensors()
    q, scale = torch.zeros(5, 272).to(torch.float8_e4m3fn), torch.ones(5, 3)
    rest = ids.int(), scores
    for _ in range(2):
        y = forward(backend, QuantizedRows(q, scale), *rest, weights)
        assert (argument().in_scale, argument().rows_in) == (scale.data_ptr(), q.data_ptr())
        assert y.dtype == x.dtype
        for bad in (
            q,
            *(
                QuantizedRows(*rows)
                for rows in ((x, scale), (q, scale[:, :2]), (q, scale.double()))
            ),
        ):
            refusal(forward, backend, bad, *rest, weights, of=ArgumentError)
        forward(backend, x, *rest, weights)
        assert (argument().in_scale, argument().rows_in) == (None, x.data_ptr())
    plain = Problem(272, 144, 7, 3, max_tokens=70)
    given = QuantizedRows(q, scale), *rest, weights_of(plain)
    refusal(forward, backend_of(plain), *given, of=ArgumentError)


def test_faults_are_raised_and_reset(weights):
    backend = backend_of(timeout_s=2)
    call(backend, weights)
    fault = backend.window.fault
    fault.peer, fault.index, fault.expected, fault.seen = 8, 17, 128, 96
    fault.edge = int(abi.Edge.rows_ready)
    with pytest.raises(ProtocolTimeout, match="2.0 s at edge rows_ready.*expected 128, saw 96"):
        call(backend, weights)
    with pytest.raises(WindowBroken):
        call(backend, weights)
    backend.reset()
    call(backend, weights)
    abort = backend.window.regions["window_abort"].view(backend.window.memory)
    abort[0] = 4
    call(backend, weights)  # nothing on the host says so yet
    with pytest.raises(PeerFault):
        backend.check()
    backend.reset()
    backend.check()
    assert (int(abort[0]), launched()) == (0, 3)


def test_launches_on_another_stream_wait_for_the_last(streams, weights):
    backend, found = backend_of(), []
    for stream in (1, 1, 2, 2, 1):
        found.append(streams(lambda: call(backend, weights), stream))
    assert found == [[], [], [1], [], [2]]


def test_captures_are_ordered_among_themselves(streams, weights):
    """Same streams, other captures: what is captured waits for what that capture holds, and for nothing else."""
    backend = backend_of()
    backend.prepare(weights)
    for stream, capture, waited in (
        *((1, 0, []), (1, 5, []), (2, 5, [1]), (2, 0, [])),
        *((1, 0, [2]), (1, 6, []), (1, 0, []), (2, 0, [1])),
    ):  # behind a capture the order of launches outside of it is the user's; within one it is ours
        assert streams(lambda: call(backend, weights), stream, capture) == waited


@pytest.mark.parametrize("stream", [0, 0x5000])
def test_tensors_of_a_launch_are_kept_for_its_stream(monkeypatch, weights, stream):
    """By the allocator: memory that the caller frees behind a launch on a side stream must not be given away."""
    plain = replace(PROBLEM, precision="bf16")
    backend, trained, masters, kept = backend_of(), backend_of(plain), weights_of(plain), set()
    (x, ids, scores), count = tensors(), torch.ones(1, dtype=torch.int32)
    q, scale = torch.zeros(5, 272).to(torch.float8_e4m3fn), torch.ones(5, 3)
    backend.prepare(weights)
    trained.prepare(masters)

    def check(*given):
        assert [(t.data_ptr(), stream) in kept for t in given] == [bool(stream)] * len(given)
        kept.clear()

    def note(t, on):
        kept.add((t.data_ptr(), on.cuda_stream))

    monkeypatch.setattr(Stream, "cuda_stream", stream)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.Tensor, "record_stream", note)
    out = torch.zeros_like(x)
    forward(backend, x, ids, scores, weights, num_tokens_device=count, out=out)
    check(x, ids, scores, out, count)
    forward(backend, QuantizedRows(q, scale), ids, scores, weights)
    check(q, scale)
    given = Call(x, ids, scores, masters, count)
    y, state = trained.forward(given, keep=True)
    check(x, ids, scores, y, state, count)
    dy = torch.zeros_like(x)
    dx, d_scores, *_ = trained.backward(given, dy, state, GradRequest(Needs(b13=False, b2=False)))
    check(dy, x, ids, state, dx, d_scores, count)


def test_grids_are_even_and_leave_what_is_reserved(weights):
    for reserve, ctas in {0: 132, 1: 130, 2: 130, 3: 128, 19: 112, 20: 112, 129: 2, 130: 2}.items():
        backend = backend_of(reserve_sms=reserve)
        call(backend, weights)
        assert config()["grid"] == [ctas, 1, 1]
        backend.close()


def test_statistics_come_from_the_tables_of_the_last_launch(weights):
    window = Window(PROBLEM, device="cpu")
    layer, other = (mega.MegaBackend(PROBLEM, window=window, pool_rows=2048) for _ in range(2))
    gone = "another layer's, or there was none"
    with pytest.raises(MegaMoEError, match=gone):
        layer.statistics()
    call(layer, weights)
    routes = layer.plan.window["window_routes"].view(window.memory)
    prefix = layer.plan.views(window.workspace(layer.plan))["chunk_prefix"]
    prefix[:] = 99
    prefix[:, :3] = torch.tensor([[0, 1000, 1990]] + [[0, 0, 32]] * 6)
    window.epoch_cell[0] = 7
    routes[0, :, 0], routes[1, :, 0] = 70, 64  # of launch 6, of launch 7
    for first, passes in ((1990, 2), (1024, 1)):  # 2048 + 6 * 128 rows
        found = layer.statistics()
        assert found.tokens_per_expert.tolist() == [first] + [32] * 6
        assert found.passes.tolist() == [passes]
        prefix[0, :3] = torch.tensor([0, 900, 1024])
    call(other, weights)
    with pytest.raises(MegaMoEError, match=gone):
        layer.statistics()
    window.close()


def test_layers_share_a_window(weights):
    window = Window(replace(PROBLEM, max_tokens=200), device="cpu")
    layers = [mega.MegaBackend(PROBLEM, window=window) for _ in range(2)]
    small = mega.MegaBackend(replace(PROBLEM, max_tokens=30), window=window, pool_rows=2048)
    workspaces, hashes = [], set()
    for layer in (*layers, small):
        call(layer, weights)
        got = argument()
        assert (got.max_tokens, got.epoch) == (200, window.epoch_cell.data_ptr())
        workspaces.append(got.x_pool)
        hashes.add(got.config_hash)
    assert len(hashes) == 3, "a layer called in place of its equal would not be noticed"
    assert workspaces[0] == workspaces[1] != workspaces[2]  # equal layers share the workspace, too
    for name, value in (("hidden", 256), ("max_tokens", 201), ("precision", "bf16")):
        with pytest.raises(ConfigError, match=f"{name} is {value}"):
            mega.MegaBackend(replace(PROBLEM, **{name: value}), window=window)
    for layer in layers:
        layer.close()
    assert not window.closed
    window.close()
    with pytest.raises(WindowBroken, match="closed"):
        call(small, weights)


def test_bad_calls_are_refused_before_the_launch(weights):
    backend, (x, ids, scores) = backend_of(), tensors(3)
    error = refusal(forward, backend, *tensors(71), weights, of=ArgumentError)
    assert error.argument == "x.shape[0]"
    error = refusal(forward, backend, x, ids.int(), scores.double(), weights, of=ArgumentError)
    assert error.argument == "topk_weights.dtype"
    with pytest.raises(ConfigError, match="reserve_sms"):
        backend_of(reserve_sms=132)
    assert "needs a CUDA device" in mega.why_not_mega(PROBLEM, torch.device("cpu"))


def test_a_step_is_at_least_a_group(weights):
    with pytest.raises(
        ConfigError, match="step_blocks is 15, expected 0 .automatic. or at least 16"
    ):
        backend_of(step_blocks=15)
    backend = backend_of(step_blocks=17)
    call(backend, weights)
    assert argument().step_blocks == 17
    order = (paths.CSRC / "megamoe" / "schedule" / "order.h").read_text()
    assert f"constexpr int max_run = {mega.MAX_RUN};" in order
