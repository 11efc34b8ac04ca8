"""MegaMoE on one GPU: gradients, torch.compile, autocast, streams, graphs, moving parameters, checkpoints, closing."""

import importlib.util
import shutil

import pytest
import torch

from megamoe import MegaMoE
from megamoe.backends import reference
from megamoe.core.errors import ArgumentError
from megamoe.formats.weights import ExpertWeights
from megamoe.layer.autograd import apply
from megamoe.layer.inputs import Inputs
from megamoe.testing import assert_close, make_inputs, same_bits

pytestmark = pytest.mark.gpu
BACKEND, DEVICE = "mega", "cuda"
# Both sides compute the gradients from y of the same problem; staged's y has other roundings (docs/numerics.md).
STAGED = {"bf16": 1e-2, "fp8": 4e-2}


@pytest.fixture(params=["bf16", "fp8"])
def precision(request):
    return request.param


@pytest.fixture
def make(precision):
    """Make layers, and close them at the end."""
    layers = []

    def make(**options):
        options = {"precision": precision, "backend": BACKEND, "init_seed": 1, **options}
        layers.append(MegaMoE(512, 384, 9, 3, max_tokens=256, device=DEVICE, **options))
        return layers[-1]

    yield make
    for layer in layers:
        layer.check()
        layer.close()


def call_of(layer, seed=0):
    inputs = make_inputs(layer.problem, 200, seed=seed, routing="dropped", device=DEVICE)
    return inputs.x, inputs.topk_ids, inputs.topk_weights


def trained(layer, function=None, parameters=None):
    """Return y, loss and all gradients of one step on a fixed target."""
    parameters = parameters or dict(layer.named_parameters())
    x, ids, scores = call_of(layer)
    x, scores = x.clone().requires_grad_(), scores.clone().requires_grad_()
    layer.zero_grad()
    y = (function or layer)(x, ids, scores)
    target = torch.randn(y.shape, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(4))
    loss = (y.float() - target).square().mean()
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in parameters.items()}
    return {"y": y.detach(), "loss": loss.detach(), "x": x.grad, "scores": scores.grad, **gradients}


def assert_equal_steps(found, expected, relative):
    for name, value in expected.items():
        assert value.abs().max() > 0, name
        assert_close(found[name], value, relative=relative, name=name)


@pytest.mark.parametrize("bias", [False, True])
def test_loss_and_gradients_equal_those_of_staged(make, precision, bias):
    options = {"bias": bias, "weight_gradients": "bf16"}  # as staged has them
    found, expected = (trained(make(backend=b, **options)) for b in (BACKEND, "staged"))
    assert_equal_steps(found, expected, STAGED[precision])


def test_gradients_equal_those_of_fp32(make, precision):
    if precision == "fp8":
        pytest.skip("the gradient of a quantization is a convention, not a derivative")
    layer = make()
    masters = {n: p.detach().float().requires_grad_() for n, p in layer.named_parameters()}

    def forward(x, ids, scores):
        arguments = ([x], [ids], [scores], [ExpertWeights(**masters)])
        return reference.forward(layer.problem, *arguments, rounding="none")["y"][0]

    expected = trained(layer, forward, masters)
    assert_equal_steps(trained(layer), expected, relative=2e-2)


def test_an_optimizer_step_reaches_the_kernel_and_the_checkpoint(make):
    layer = make(bias=True)
    before = layer(*call_of(layer)).detach()
    optimizer = torch.optim.SGD(layer.parameters(), lr=50.0)
    trained(layer)
    optimizer.step()
    after = layer(*call_of(layer)).detach()
    assert after.isfinite().all()
    assert not same_bits(after, before)
    other = make(bias=True, init_seed=7)
    assert not same_bits(other(*call_of(layer)), after)
    other.load_state_dict(layer.state_dict())
    assert same_bits(other(*call_of(layer)), after)


def test_given_fp8_weights_in_a_checkpoint(make, precision):
    if precision == "bf16":
        pytest.skip("FP8 weights are for FP8 layers")
    layer, given, loaded = make(), make(init_seed=2), make(init_seed=3)
    y = layer(*call_of(layer))
    q = layer.expert_weights().quantized(layer.problem)
    given.load_fp8_weights(q.w13, q.w2, q.w13_scale, q.w2_scale)
    loaded.load_state_dict(given.state_dict())
    assert same_bits(given(*call_of(layer)), y)
    assert same_bits(loaded(*call_of(layer)), y)


def compilers():
    inductor = importlib.util.find_spec("triton") is not None and shutil.which("gcc") is not None
    missing = pytest.mark.skipif(not inductor, reason="inductor needs triton and gcc")
    return ["aot_eager", pytest.param("inductor", marks=missing)]


@pytest.mark.parametrize("compiler", compilers())
def test_compiles_into_one_graph(make, compiler):
    layer = make()
    layer.prepare()

    def model(x, ids, scores):
        return layer(x * 1.5, ids, scores.softmax(-1)) * 2

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=compiler)
    assert_equal_steps(trained(layer, compiled), trained(layer, model), relative=1e-2)


def test_autocast(make):
    layer = make()
    x, ids, scores = call_of(layer)
    y = layer(x, ids, scores)
    with pytest.raises(ArgumentError, match=r"x.dtype is torch.float32"):
        layer(x.float(), ids, scores)
    leaf = x.float().requires_grad_()
    with torch.autocast(DEVICE, torch.bfloat16):
        cast = layer(leaf, ids, scores)
    assert same_bits(cast, y)
    cast.float().sum().backward()
    assert leaf.grad.dtype == torch.float32
    assert leaf.grad.abs().max() > 0


def test_side_stream(make):
    layer = make()
    expected = trained(layer)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        found = trained(layer)
        inputs = [call_of(layer, seed) for seed in range(3)]
        ys = [layer(*i) for i in inputs]
    torch.cuda.current_stream().wait_stream(side)
    assert same_bits(found["y"], expected["y"])
    assert_equal_steps(found, expected, relative=1e-2)
    assert all(same_bits(layer(*i), y) for i, y in zip(inputs, ys, strict=True))


def test_graph(make):
    layer = make()
    layer.prepare()
    static = [t.clone() for t in call_of(layer)]
    with torch.no_grad():
        layer(*static)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(*static)
        for seed in (1, 2):
            for to, new in zip(static, call_of(layer, seed), strict=True):
                to.copy_(new)
            graph.replay()
            assert same_bits(y, layer(*call_of(layer, seed)))
    layer.check()


@torch.no_grad()
def test_graph_follows_parameters(make):
    """Replays and the calls between them use the parameters of their time, also after uncounted writes."""
    layer = make()
    layer.prepare()
    static = call_of(layer)
    before = layer(*static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(*static)
    for _ in range(2):
        for p in layer.parameters():
            p.data.mul_(2)
        graph.replay()
        assert not same_bits(y, before)
        assert same_bits(y, layer(*static))
        fresh = make(init_seed=2)
        fresh.load_state_dict(layer.state_dict())
        assert same_bits(y, fresh(*static))


def copied(layer, values):
    for name, p in layer.named_parameters():
        p.copy_(values[name])


def loaded(layer, values):
    layer.load_state_dict(values)


def uncounted(layer, values):
    for name, p in layer.named_parameters():
        p.data.copy_(values[name])
    layer.invalidate()


@torch.no_grad()
def test_new_weights_between_replays(make):
    """A layer that serves: written in place, then prepare(); without it FP8 replays keep the old ones."""
    layer = make().requires_grad_(False)
    layer.prepare()
    static = call_of(layer)
    layer(*static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(*static)
    for seed, write in enumerate((copied, loaded, uncounted), 2):
        fresh = make(init_seed=seed)
        write(layer, {name: p.detach().clone() for name, p in fresh.named_parameters()})
        layer.prepare()
        graph.replay()
        assert same_bits(y, fresh(*static)), write.__name__
    layer.check()


@torch.no_grad()
def test_parameters_whose_storage_moves(make):
    """As FSDP moves them: freed and filled again (1), or another tensor at each call (2)."""
    layer = make()
    contents, expected = [], []
    for seed in (1, 2):
        other = make(init_seed=seed)
        contents.append({name: p.clone() for name, p in other.named_parameters()})
        expected.append(other(*call_of(other)))
    assert not same_bits(*expected)
    for n, move in enumerate(("free", "replace", "replace", "free", "free", "replace")):
        for name, parameter in layer.named_parameters():
            if move == "replace":
                parameter.data = contents[n % 2][name].clone()
                continue
            storage = parameter.untyped_storage()
            size = storage.nbytes()
            if DEVICE == "cuda":
                torch.cuda.synchronize()
            storage.resize_(0)
            storage.resize_(size)
            parameter.copy_(contents[n % 2][name])
        assert same_bits(layer(*call_of(layer)), expected[n % 2]), f"{move}, call {n}"


def test_trains_behind_inference_mode(make):
    expected, layer = trained(make()), make()
    x, ids, scores = call_of(layer)
    with torch.inference_mode():
        y = layer(x, ids, scores)
    assert same_bits(y, expected["y"])
    found = trained(layer)
    assert found.keys() == expected.keys()
    assert all(same_bits(found[name], expected[name]) for name in expected)
    with torch.inference_mode():
        layer.w13.mul_(2)  # an FP8 copy follows
        y = layer(x, ids, scores).clone()
    other = make()
    with torch.no_grad():
        other.w13.mul_(2)
        assert same_bits(y, other(x, ids, scores))


def test_close_and_reopen(make):
    layer = make()
    y = layer(*call_of(layer))
    handle, weights = layer._layer.handle, layer.expert_weights()
    layer.close()
    layer.close()
    with pytest.raises(RuntimeError, match=f"the layer of handle {int(handle)} is closed"):
        apply(Inputs.of(*call_of(layer), weights), handle)
    assert same_bits(layer(*call_of(layer)), y)


@pytest.mark.parametrize("name", ["x", "topk_ids", "topk_weights", "w13", "w2"])
def test_freed_memory_is_refused(make, name):
    """An address of nothing would end the process; in a first call, and behind calls of the same shapes."""
    layer = make()
    x, ids, scores = call_of(layer)
    given = {"x": x, "topk_ids": ids, "topk_weights": scores}

    def freed(t):
        t = t.detach().clone()
        t.untyped_storage().resize_(0)
        return t

    with torch.no_grad():
        for _ in range(2):
            if name in given:
                with pytest.raises(
                    ArgumentError, match=rf"{name}.untyped_storage\(\) is of 0 bytes"
                ):
                    layer(*(given | {name: freed(given[name])}).values())
            else:
                kept = getattr(layer, name).data
                getattr(layer, name).data = freed(kept)
                with pytest.raises(
                    ArgumentError, match=rf"{name}.untyped_storage\(\) is of 0 bytes"
                ):
                    layer(*given.values())
                getattr(layer, name).data = kept
            y = layer(*given.values())
            assert layer(*given.values()).isfinite().all()
    other = make()
    with torch.no_grad():
        assert same_bits(y, other(*given.values()))
