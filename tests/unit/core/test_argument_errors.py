"""Inputs that gave a wrong result in silence, or somebody else's error: each is right now, or refused by name."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from ambient import default_dtype
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DeviceMesh, Replicate, distribute_tensor

from megamoe import (
    Activation,
    ArgumentError,
    ConfigError,
    ExpertWeights,
    Layer,
    MegaMoE,
    Problem,
    ops,
)
from megamoe.backends.call import Call
from megamoe.backends.select import make_backend
from megamoe.testing import make_inputs, make_weights

PROBLEM = Problem(48, 32, 5, 2, max_tokens=64)
SHAPE = {"hidden": 48, "intermediate": 32, "num_experts": 5, "top_k": 2, "max_tokens": 64}


def make(**options):
    return MegaMoE(**{**SHAPE, "backend": "staged", "init_seed": 3, **options})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_nothing_follows_the_default_dtype(dtype):
    expected = make(bias=True)
    i = make_inputs(PROBLEM, 40)
    y = expected(i.x, i.topk_ids, i.topk_weights)
    with default_dtype(dtype):
        layer = make(bias=True)
        again = make_inputs(PROBLEM, 40)
        weights = make_weights(replace(PROBLEM, bias=True))
        found = layer(i.x, i.topk_ids, i.topk_weights)
    assert layer.b13.dtype == layer.b2.dtype == torch.float32
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter, expected.get_parameter(name)), name
    assert torch.equal(found, y)  # a sum over k in bf16 would differ
    assert torch.equal(again.x, i.x)
    assert torch.equal(again.topk_weights, i.topk_weights)
    assert torch.equal(weights.b2, make_weights(replace(PROBLEM, bias=True)).b2)


@pytest.mark.parametrize("backend", ["staged", "reference", "emulate"])
def test_a_layer_made_under_another_default_device_is_right(backend):
    i = make_inputs(PROBLEM, 9)
    with torch.device("meta"):
        layers = [make(device="cpu", backend=backend) for _ in range(2)]
        for layer in layers:
            layer.prepare()
    with torch.no_grad():
        layers[1].w2.mul_(2)
    ys = [layer(i.x, i.topk_ids, i.topk_weights) for layer in layers]
    plain = make(backend=backend)
    assert torch.equal(ys[0], plain(i.x, i.topk_ids, i.topk_weights))
    assert not torch.equal(ys[1], ys[0])
    with torch.device("meta"):
        assert torch.equal(layers[0](i.x, i.topk_ids, i.topk_weights), ys[0])


@pytest.mark.parametrize("backend", ["staged", "reference", "emulate"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: replace(w, w13=w.w13.float()), "weights.w13.dtype is torch.float32"),
        (lambda w: replace(w, w2=w.w2[:3].contiguous()), r"weights.w2.shape is \[3, 48, 32\]"),
        (lambda w: replace(w, w2=w.w2.to("meta")), "weights.w2.device is meta"),
        (lambda w: replace(w, b2=torch.zeros(5, 48)), "weights.b2 is given"),
    ],
    ids=["dtype", "number", "device", "bias"],
)
def test_backends_refuse_weights_that_do_not_fit(backend, change, message):
    made = make_backend(backend, PROBLEM, device="cpu")
    i = make_inputs(PROBLEM, 4)
    with pytest.raises(ArgumentError, match=message):
        made.forward(Call(i.x, i.topk_ids, i.topk_weights, change(make_weights(PROBLEM))))


@pytest.mark.parametrize("shape", [(5, 4, 2), (20, 2), (4, 5, 1, 2), (2,)])
@pytest.mark.parametrize("which", ["topk_ids", "topk_weights"])
def test_leading_sizes_are_compared(which, shape):
    """[5, 4, K] weights were once taken for [4, 5, K], in another order."""
    layer = make()
    i = make_inputs(PROBLEM, 20)
    given = {
        "x": i.x.view(4, 5, 48),
        "topk_ids": i.topk_ids.view(4, 5, 2),
        "topk_weights": i.topk_weights.view(4, 5, 2),
    }
    given[which] = given[which].flatten()[: torch.Size(shape).numel()].view(shape)
    with pytest.raises(ArgumentError, match=rf"{which}.shape is \[{shape[0]}"):
        layer(**given)


@pytest.mark.parametrize("which", ["x", "topk_ids", "topk_weights"])
@pytest.mark.parametrize("value", [None, [[1.0] * 48], 3, "x"], ids=lambda v: type(v).__name__)
def test_what_is_no_tensor_is_named(which, value):
    i = make_inputs(PROBLEM, 1)
    given = {"x": i.x, "topk_ids": i.topk_ids, "topk_weights": i.topk_weights, which: value}
    with pytest.raises(ArgumentError, match=rf"{which}.* is {type(value).__name__}, expected"):
        make()(**given)


def test_weights_that_are_none():
    i = make_inputs(PROBLEM, 1)
    for value in (None, [torch.zeros(1)]):
        with pytest.raises(ArgumentError, match="weights is"):
            Layer(PROBLEM, backend="staged")(i.x, i.topk_ids, i.topk_weights, value)
        with pytest.raises(ArgumentError, match="weights is"):
            Layer(PROBLEM, backend="staged").prepare(value)


def test_routing_weights_are_of_a_float_type():
    i = make_inputs(PROBLEM, 3)
    for dtype in (torch.int64, torch.bool, torch.complex64):
        with pytest.raises(ArgumentError, match=f"topk_weights.dtype is {dtype}"):
            make()(i.x, i.topk_ids, i.topk_weights.to(dtype))


@pytest.mark.parametrize("backend", ["staged", "reference", "emulate"])
def test_forward_mode_is_refused(backend):
    """The operator has no forward-mode formula: tangents were dropped, so jvp gave zeros."""
    layer = make(backend=backend)
    i = make_inputs(PROBLEM, 6)

    def call(x, scores):
        return layer(x, i.topk_ids, scores)

    for grad in (True, False):
        layer.requires_grad_(grad)
        with pytest.raises(ArgumentError, match="has no forward-mode derivative"):
            torch.func.jvp(lambda x: call(x, i.topk_weights), (i.x,), (torch.ones_like(i.x),))
        ones = torch.ones_like(i.topk_weights)
        with pytest.raises(ArgumentError, match="has no forward-mode derivative"):
            torch.func.jvp(lambda w: call(i.x, w), (i.topk_weights,), (ones,))
        with torch.autograd.forward_ad.dual_level(), pytest.raises(ArgumentError, match="forward"):
            call(torch.autograd.forward_ad.make_dual(i.x, torch.ones_like(i.x)), i.topk_weights)
        with torch.autograd.forward_ad.dual_level():  # no tangent, nothing to refuse
            assert call(i.x, i.topk_weights).abs().max() > 0
    layer.prepare()
    compiled = torch.compile(
        lambda x: torch.func.jvp(lambda x: call(x, i.topk_weights), (x,), (x,)), backend="eager"
    )
    with pytest.raises(RuntimeError, match="forward-mode"):
        compiled(i.x)


def test_vmap_is_the_loop_over_calls():
    layer = make()
    i = make_inputs(PROBLEM, 6)
    xs = torch.stack([i.x, i.x * 2])
    with torch.no_grad():
        found = torch.vmap(lambda x: layer(x, i.topk_ids, i.topk_weights))(xs)
        assert torch.equal(found[0], layer(xs[0], i.topk_ids, i.topk_weights))
        assert torch.equal(found[1], layer(xs[1], i.topk_ids, i.topk_weights))


def test_fullgraph_says_to_prepare_before():
    torch._dynamo.reset()
    layer = make()
    i = make_inputs(PROBLEM, 6)
    arguments = i.x, i.topk_ids, i.topk_weights
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    with pytest.raises(RuntimeError, match="prepare.*: call it before torch.compile"):
        compiled(*arguments)
    layer.prepare()
    torch._dynamo.reset()
    y = torch.compile(layer, fullgraph=True, backend="eager")(*arguments)
    assert torch.equal(y, layer(*arguments))
    layer.close()
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match="again after close"):
        torch.compile(layer, fullgraph=True, backend="eager")(*arguments)


LARGE = {"hidden": 7168, "intermediate": 2048, "num_experts": 256, "top_k": 8}  # 22 GB


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "mega"}, "backend is 'mega', expected one that can run here: the tensors"),
        ({"backend": "mega", "device": "cuda"}, "device is cuda, expected one that torch can use"),
        ({"backend": "auto", "device": "cuda"}, "device is cuda, expected one that torch can use"),
        ({"backend": "fast"}, "backend is 'fast', expected auto, mega"),
        ({"backend": None}, "backend is None, expected auto, mega"),
        ({"precision": "fp4"}, "precision is 'fp4'"),
    ],
    ids=str,
)
def test_a_layer_that_cannot_run_takes_no_memory(monkeypatch, options, message):
    def taken(*args, **kwargs):
        raise AssertionError("memory was taken")

    monkeypatch.setattr(torch, "empty", taken)
    with pytest.raises(ConfigError, match=message):
        MegaMoE(**LARGE, **options)


def test_the_variable_is_checked_by_the_constructor(monkeypatch):
    monkeypatch.setenv("MEGAMOE_BACKEND", "fast")
    with pytest.raises(ConfigError, match="MEGAMOE_BACKEND is 'fast'"):
        make(backend="auto")


def test_world_before_init_is_not_alone(monkeypatch):
    """dist.group.WORLD is None before init_process_group(): every rank held all experts."""
    assert dist.group.WORLD is None
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match='init_process_group.*WORLD_SIZE is 2.*group="alone"'):
        make(group=dist.group.WORLD)
    for create in (Layer, lambda p, g=None: make_backend("staged", p, g, device="cpu")):
        with pytest.raises(ConfigError, match="WORLD_SIZE is 2"):
            create(PROBLEM, dist.group.WORLD)
    assert make(group="alone").problem.ep_size == 1
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert make(group=dist.group.WORLD).group is None


@pytest.mark.parametrize("group", ["world", [0, 1], 1, True, torch.zeros(2)], ids=repr)
def test_what_is_no_group_is_named(group):
    with pytest.raises(ConfigError, match="group is"):
        make(group=group)


def fp8_state():
    problem = replace(PROBLEM, precision="fp8")
    return {k: v for k, v in make_weights(problem).named().items() if k[0] == "w"}


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("holds_fp8", [False, True])
def test_fp8_weights_without_scales_are_not_loaded(precision, strict, holds_fp8):
    """They were cast: e4m3 numbers, without their scales, became the bf16 masters."""
    if holds_fp8 and precision == "bf16":
        return
    model = torch.nn.ModuleDict({"moe": make(precision=precision)})
    if holds_fp8:
        model["moe"].load_fp8_weights(**fp8_state())
    before = {k: v.float() for k, v in model.state_dict().items()}
    good, masters = fp8_state(), make(init_seed=9).state_dict()
    cases = {
        "no scales": {k: good[k] for k in ("w13", "w2")},
        "one scale": {k: v for k, v in good.items() if k != "w2_scale"},
        "one master": {**good, "w2": masters["w2"]},
        "another fp8": {**good, "w13": good["w13"].to(torch.float8_e5m2)},
        "bytes": {**good, "w2": good["w2"].view(torch.uint8)},
    }
    if precision == "bf16":
        cases["scales, but bf16"] = good
    if holds_fp8:
        cases["masters"] = masters
    for what, state in cases.items():
        state = {f"moe.{name}": tensor for name, tensor in state.items()}
        with pytest.raises(ArgumentError, match=r"moe\.w.* of the state dict is"):
            model.load_state_dict(state, strict=strict)
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor.float(), before[name]), (what, name)


def test_checkpoints_that_fit_are_loaded():
    layer = make(precision="fp8")
    layer.load_state_dict({k: v.float() for k, v in make(init_seed=9).state_dict().items()})
    assert torch.equal(layer.w13, make(init_seed=9).w13)
    for _ in range(2):  # in place of masters, then in place of FP8 weights
        layer.load_state_dict(fp8_state())
        assert torch.equal(layer.w2.float(), fp8_state()["w2"].float())
        assert torch.equal(layer.w2_scale, fp8_state()["w2_scale"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"init_seed": "a"}, "init_seed is 'a'"),
        ({"init_seed": 2**64}, "init_seed is 18446744073709551616, expected an int from 0 to"),
        ({"activation": ["swiglu"]}, r"activation is \['swiglu'\], expected one of"),
        ({"precision": {}}, r"precision is {}, expected bf16 or fp8"),
        ({"backend": ["staged"]}, r"backend is \['staged'\], expected auto"),
        ({"routed_scaling_factor": "x"}, "routed_scaling_factor is x, expected a finite number"),
        ({"routed_scaling_factor": float("nan")}, "routed_scaling_factor is nan"),
        ({"reserve_sms": "many"}, "reserve_sms is 'many'"),
        ({"window": "mine"}, "window is 'mine'"),
    ],
    ids=str,
)
def test_options_of_other_types_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        make(**options)


def test_an_out_that_does_not_fit_is_refused_where_it_is_traced():
    """copy_() would repeat y, or cast it."""
    torch._dynamo.reset()
    layer, i = make().requires_grad_(False), make_inputs(PROBLEM, 6)
    layer.prepare()
    compiled = torch.compile(layer, backend="eager")
    y, right = layer(i.x, i.topk_ids, i.topk_weights), torch.empty_like(i.x)
    assert torch.equal(compiled(i.x, i.topk_ids, i.topk_weights, out=right), y)
    wrong = {"shape": torch.empty(2, 6, 48, dtype=torch.bfloat16), "dtype": torch.empty(6, 48)}
    for what, out in wrong.items():
        with pytest.raises(ArgumentError, match=rf"out\.{what} is"):
            compiled(i.x, i.topk_ids, i.topk_weights, out=out)


def test_out_is_x_or_has_a_storage_of_its_own():
    """A row of y that lies on another row of x may be written before that row is read, on another SM."""
    layer, i = make(), make_inputs(PROBLEM, 12)
    with torch.no_grad():
        y = layer(i.x, i.topk_ids, i.topk_weights)
        for _ in range(2):  # a checked call, then one that is known
            x = i.x.clone()
            for out in (x[:], x):
                assert torch.equal(layer(x.copy_(i.x), i.topk_ids, i.topk_weights, out=out), y)
            room = torch.empty(20, 48, dtype=torch.bfloat16)  # a part of a larger output
            assert torch.equal(layer(i.x, i.topk_ids, i.topk_weights, out=room[3:15]), y)
            memory = torch.cat([i.x, i.x])
            for x, out in ((memory[:12], memory[1:13]), (memory[:12], memory[12:])):
                with pytest.raises(ArgumentError, match="out is in a storage that the call reads"):
                    layer(x, i.topk_ids, i.topk_weights, out=out)


@pytest.mark.parametrize("backend", ["staged", "reference", "emulate"])
def test_negative_views_are_read_with_their_sign(backend):
    """The kernel reads memory, where the sign of such a view is not changed yet."""
    layer = make(backend=backend)
    i = make_inputs(PROBLEM, 12)
    negative = torch.complex(i.topk_weights, i.topk_weights).conj().imag
    assert negative.is_neg()
    with torch.no_grad():
        expected = layer(i.x, i.topk_ids, -i.topk_weights)
        for _ in range(2):
            assert torch.equal(layer(i.x, i.topk_ids, negative.contiguous()), expected)
            assert torch.equal(layer(i.x, i.topk_ids, torch._neg_view(i.topk_weights)), expected)


@pytest.mark.parametrize("backend", ["staged", "reference", "emulate"])
def test_ids_are_compared_in_64_bits_and_counts_clamped(backend):
    layer = Layer(PROBLEM, backend=backend)
    i, weights = make_inputs(PROBLEM, 6), make_weights(PROBLEM)

    def call(ids, count=None):
        count = None if count is None else torch.tensor([count], dtype=torch.int32)
        return layer(i.x, ids, i.topk_weights, weights, num_tokens_device=count)

    y = call(i.topk_ids)
    assert y.abs().max() > 0
    for ids in (2**32 + 1, 2**40 + 2, -(2**63), -(2**31), 2**31):
        assert not call(torch.full_like(i.topk_ids, ids)).any()
    for count, tokens in ((0, 0), (-1, 0), (-(2**31), 0), (6, 6), (7, 6), (2**31 - 1, 6)):
        assert torch.equal(call(i.topk_ids, count)[:tokens], y[:tokens])


@pytest.mark.parametrize("name", ["alpha", "limit", "up_offset"])
@pytest.mark.parametrize("value", ["a", None, [1]])
def test_numbers_of_an_activation_are_numbers(name, value):
    with pytest.raises(ConfigError, match=rf"activation.{name} is .*, expected a number"):
        Activation("clamped_swiglu", **{name: value})


def freed(t, behind=0):
    """As FSDP, offloading and swapping leave what they take away; `behind` so many bytes that went with it."""
    t = torch.empty(behind // t.element_size() + t.numel(), dtype=t.dtype)[-t.numel() :].view_as(t)
    t.untyped_storage().resize_(0)
    return t


GIVEN = ("x", "topk_ids", "topk_weights", "out", "num_tokens_device", "w13", "w2", "b13", "b2")


@pytest.mark.parametrize("backend", ["staged", "emulate"])
@pytest.mark.parametrize("name", GIVEN)
def test_freed_memory_is_refused(name, backend):
    """In a first call, and behind good ones of the same shapes; also where a view of it lies behind its beginning."""
    problem = replace(PROBLEM, bias=True)
    layer, weights, i = (
        Layer(problem, backend=backend),
        make_weights(problem),
        make_inputs(problem, 9),
    )
    good = {"x": i.x, "topk_ids": i.topk_ids, "topk_weights": i.topk_weights}
    good |= {
        "out": torch.empty_like(i.x),
        "num_tokens_device": torch.tensor([9], dtype=torch.int32),
    }

    def call(given):
        given = {**good, **given}
        own = {n: given.pop(n) for n in given.keys() - good.keys()}
        return layer(**given, weights=replace(weights, **own))

    of = good[name] if name in good else getattr(weights, name)
    with torch.no_grad():
        for _ in range(2):
            for gone in (freed(of), freed(of, 256), freed(of, 1 << 24)):
                with pytest.raises(
                    ArgumentError, match=rf"{name}.untyped_storage\(\) is of 0 bytes"
                ):
                    call({name: gone})
            call({})
            call({})  # known by now


def test_memory_freed_in_part_is_refused():
    """Of a view whose storage still has as many bytes, but not up to where the view ends."""
    layer, i = make(backend="emulate"), make_inputs(PROBLEM, 9)
    x = torch.empty(512 + i.x.numel(), dtype=i.x.dtype)[512:].view_as(i.x)
    held = x.untyped_storage().nbytes() - x.element_size()
    x.untyped_storage().resize_(held)
    with pytest.raises(ArgumentError, match=rf"x.untyped_storage\(\) is of {held} bytes"):
        layer(x, i.topk_ids, i.topk_weights)


@pytest.mark.parametrize("trains", [False, True])
def test_memory_freed_between_calls_of_a_graph_is_refused(trains):
    torch._dynamo.reset()  # others' compilations count against its limit
    layer, i = make(backend="emulate"), make_inputs(PROBLEM, 9)
    layer.prepare()
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    with torch.set_grad_enabled(trains):
        for _ in range(2):
            y = compiled(i.x, i.topk_ids, i.topk_weights)
        assert y.requires_grad == trains
        i.topk_ids.untyped_storage().resize_(0)
        with pytest.raises(ArgumentError, match=r"topk_ids.untyped_storage\(\) is of 0 bytes"):
            compiled(i.x, i.topk_ids, i.topk_weights)


@pytest.mark.parametrize("name", ["x", "topk_weights", "w13", "b2"])
def test_memory_freed_behind_a_call_is_refused_in_its_backward_pass(name):
    layer = make(bias=True, backend="emulate")
    i = make_inputs(PROBLEM, 9)
    given = {
        "x": i.x.clone(),
        "topk_weights": i.topk_weights.clone(),
        **dict(layer.named_parameters()),
    }
    y = layer(given["x"].requires_grad_(), i.topk_ids, given["topk_weights"])
    given[name].data.untyped_storage().resize_(0)
    with pytest.raises(ArgumentError, match=rf"{name}.untyped_storage\(\) is of 0 bytes"):
        y.float().sum().backward()


KINDS = {
    "nested": lambda t: torch.nested.nested_tensor([t]),
    "sparse": lambda t: t.to_sparse(),
    "csr": lambda t: t.to_sparse_csr(),
    "mkldnn": lambda t: t.to_mkldnn(),
}


@pytest.mark.filterwarnings("ignore:.*prototype stage:UserWarning", "ignore:Sparse CSR:UserWarning")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["x", "topk_weights", "w13"])
def test_tensors_without_strides_are_refused(name, kind):
    layer, weights, i = (
        Layer(PROBLEM, backend="staged"),
        make_weights(PROBLEM),
        make_inputs(PROBLEM, 9),
    )
    good = {"x": i.x, "topk_ids": i.topk_ids, "topk_weights": i.topk_weights, "weights": weights}
    if name == "w13":
        bad = {"weights": replace(weights, w13=KINDS[kind](weights.w13[0]))}
    else:
        bad = {name: KINDS[kind](good[name])}
    with torch.no_grad():
        for _ in range(2):
            with pytest.raises(ArgumentError, match=rf"{name}.layout is"):
                layer(**{**good, **bad})
            layer(**good)
            layer(**good)


def test_ids_with_a_sign_to_come_are_refused_behind_good_calls():
    layer, weights, i = (
        Layer(PROBLEM, backend="emulate"),
        make_weights(PROBLEM),
        make_inputs(PROBLEM, 9),
    )
    with torch.no_grad():
        for _ in range(2):
            layer(i.x, i.topk_ids, i.topk_weights, weights)
        with pytest.raises(ArgumentError, match="topk_ids is a negative view"):
            layer(i.x, torch._neg_view(-i.topk_ids), i.topk_weights, weights)


@pytest.fixture
def replicated():
    """A function that makes a DTensor of a tensor, over the one rank of a mesh."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = DeviceMesh("cpu", [0])
    yield lambda t: distribute_tensor(t, mesh, [Replicate()])
    dist.destroy_process_group()


@pytest.mark.parametrize("known", [False, True])
def test_dtensors_are_named(replicated, known):
    """Torch's own words were of its dispatcher, and of the first operation that met one."""
    layer, weights = Layer(PROBLEM, "alone", backend="staged"), make_weights(PROBLEM)
    i = make_inputs(PROBLEM, 9)
    good = {"x": i.x, "topk_ids": i.topk_ids, "topk_weights": i.topk_weights}
    if known:
        layer(**good, weights=weights)
    for name, t in good.items():
        with pytest.raises(ArgumentError, match=f"{name} is a DTensor, expected a tensor of this"):
            layer(**{**good, name: replicated(t)}, weights=weights)
    with pytest.raises(ArgumentError, match="weights.w2 is a DTensor"):
        layer(**good, weights=replace(weights, w2=replicated(weights.w2)))
    with pytest.raises(ArgumentError, match="mat_a is a DTensor"):
        ops.grouped_mm(replicated(i.x), weights.w13.mT[:1])
    assert layer(**good, weights=weights).any()


@pytest.mark.parametrize("backend", ["staged", "reference", "emulate"])
def test_a_layer_is_made_of_memory(backend):
    """Of a meta device or below FakeTensorMode it took what nobody can read, and `emulate` ended the process."""
    layer, i = make(backend=backend), make_inputs(PROBLEM, 9)
    rows = i.x, i.topk_ids, i.topk_weights
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        for call in (
            layer.prepare,
            lambda: layer(mode.from_tensor(i.x), i.topk_ids, i.topk_weights),
        ):
            with pytest.raises(
                ArgumentError, match=r"w13 is a fake tensor, .* prepare\(\) the layer"
            ):
                call()
    assert layer(*rows).any()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert layer(mode.from_tensor(i.x), i.topk_ids, i.topk_weights).shape == i.x.shape
    for other in (make(backend=backend), layer):
        with pytest.raises(ArgumentError, match="w13.device is meta, expected a device with mem"):
            other.to("meta")(*(t.to("meta") for t in rows))


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("fp8", torch.float64), ("fp8", torch.float16), ("bf16", torch.float32)],
)
def test_masters_of_another_type_are_told_which(precision, dtype):
    i = make_inputs(PROBLEM, 9)
    rows = i.x, i.topk_ids, i.topk_weights
    with pytest.raises(ArgumentError, match=f"w13.dtype is {dtype}, expected torch.bfloat16"):
        make(precision=precision).to(dtype)(*rows)


def test_weights_of_lists_are_named_by_prepare():
    weights = make_weights(PROBLEM)
    with pytest.raises(ArgumentError, match="weights.w13 is list, expected a tensor"):
        Layer(PROBLEM, backend="staged").prepare(replace(weights, w13=weights.w13.tolist()))
    with pytest.raises(ArgumentError, match="w1 is NoneType, expected a tensor"):
        ExpertWeights.from_w1_w3(None, None, None)
