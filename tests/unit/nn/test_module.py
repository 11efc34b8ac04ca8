"""MegaMoE: parameters, init, state_dict, FP8 weights, autocast, training, closing; and two gloo ranks."""

import copy
import gc
import io

import pytest
import torch
import torch.distributed as dist

import megamoe
from megamoe import ConfigError, MegaMoE, Problem
from megamoe.backends.select import make_backend
from megamoe.core.errors import ArgumentError
from megamoe.layer.runtime import _runtimes
from megamoe.testing import assert_close, launch, make_inputs, make_weights

SHAPE = {"hidden": 48, "intermediate": 32, "num_experts": 5, "top_k": 2}


def make(**options):
    return MegaMoE(**{**SHAPE, "backend": "staged", "init_seed": 3, "max_tokens": 64, **options})


def test_parameters_and_state_dict():
    layer = make(bias=True)
    shapes = {name: (tuple(p.shape), p.dtype) for name, p in layer.named_parameters()}
    assert shapes == {
        "w13": ((5, 64, 48), torch.bfloat16),
        "w2": ((5, 48, 32), torch.bfloat16),
        "b13": ((5, 64), torch.float32),
        "b2": ((5, 48), torch.float32),
    }
    assert list(layer.state_dict()) == ["w13", "w2", "b13", "b2"]
    assert list(make().state_dict()) == ["w13", "w2"]
    assert make(activation="relu2").w13.shape == (5, 32, 48)
    other = make(bias=True, init_seed=4)
    assert not torch.equal(other.w13, layer.w13)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.w13, layer.w13)


def test_init_is_scaled_and_seeded():
    layer = make(hidden=256, intermediate=64)
    assert layer.w13.float().std().item() == pytest.approx(256**-0.5, rel=0.15)
    assert layer.w2.float().std().item() == pytest.approx(64**-0.5, rel=0.15)
    assert layer.w13.float().abs().max() <= 2.01 * 256**-0.5
    assert torch.equal(layer.w13, make(hidden=256, intermediate=64).w13)
    assert not torch.equal(layer.w13[0], layer.w13[1])
    torch.manual_seed(1)
    first = make(init_seed=None).w13
    assert not torch.equal(first, make(init_seed=None).w13)
    assert make(device="meta").w13.is_meta


def test_leading_dimensions_and_id_types():
    layer = make()
    inputs = make_inputs(layer.problem, 24)
    y = layer(inputs.x, inputs.topk_ids, inputs.topk_weights)
    shaped = layer(
        inputs.x.view(2, 12, 48),
        inputs.topk_ids.int().view(2, 12, 2),
        inputs.topk_weights.view(2, 12, 2),
    )
    assert shaped.shape == (2, 12, 48)
    assert torch.equal(shaped.view(24, 48), y)
    assert y.abs().max() > 0
    with pytest.raises(ArgumentError, match=r"topk_ids.shape is \[24, 2\], expected \[2, 12\]"):
        layer(inputs.x.view(2, 12, 48), inputs.topk_ids, inputs.topk_weights)


def test_autocast_rule():
    layer = make()
    inputs = make_inputs(layer.problem, 8)
    y = layer(inputs.x, inputs.topk_ids, inputs.topk_weights)
    with pytest.raises(ArgumentError, match=r"x.dtype is torch.float32"):
        layer(inputs.x.float(), inputs.topk_ids, inputs.topk_weights)
    x = inputs.x.float().requires_grad_()
    scores = inputs.topk_weights.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        cast = layer(x, inputs.topk_ids, scores)
    assert cast.dtype == torch.bfloat16
    assert torch.equal(cast, y)
    cast.float().sum().backward()
    assert x.grad.dtype == torch.float32
    assert x.grad.abs().max() > 0
    assert scores.grad.shape == scores.shape
    rounded = layer(inputs.x, inputs.topk_ids, inputs.topk_weights.bfloat16())
    assert_close(rounded, y, relative=0.01)


def test_given_fp8_weights():
    layer = make(precision="fp8")
    inputs = make_inputs(layer.problem, 16)
    y = layer(inputs.x, inputs.topk_ids, inputs.topk_weights)
    q = layer.expert_weights().quantized(layer.problem)
    other = make(precision="fp8", init_seed=5)
    other.load_fp8_weights(q.w13, q.w2, q.w13_scale, q.w2_scale)
    assert torch.equal(other(inputs.x, inputs.topk_ids, inputs.topk_weights), y)
    assert set(other.state_dict()) == {"w13", "w2", "w13_scale", "w2_scale"}
    third = make(precision="fp8", init_seed=6)
    third.load_state_dict(other.state_dict())
    assert torch.equal(third(inputs.x, inputs.topk_ids, inputs.topk_weights), y)
    x = inputs.x.clone().requires_grad_()
    third(x, inputs.topk_ids, inputs.topk_weights).float().sum().backward()
    assert x.grad.abs().max() > 0
    assert third.w13.grad is None
    with pytest.raises(ArgumentError, match=r"w13.dtype"):
        other.load_fp8_weights(layer.w13.detach(), q.w2, q.w13_scale, q.w2_scale)
    with pytest.raises(ConfigError, match="precision"):
        make().load_fp8_weights(q.w13, q.w2, q.w13_scale, q.w2_scale)


def test_prepare_close_and_reopen():
    layer = make()
    inputs = make_inputs(layer.problem, 4)
    layer.prepare()
    layer.check()
    handle = int(layer._layer.handle)
    y = layer(inputs.x, inputs.topk_ids, inputs.topk_weights)
    layer.close()
    layer.close()
    gc.collect()
    assert handle not in _runtimes
    assert torch.equal(layer(inputs.x, inputs.topk_ids, inputs.topk_weights), y)


def test_bad_options_and_copies():
    with pytest.raises(ConfigError, match="dtype is torch.float16, expected torch.bfloat16"):
        make(dtype=torch.float16)
    with pytest.raises(ConfigError, match="backend is 'magic'"):
        make(backend="magic").prepare()


def test_copies():
    """Of a layer of one rank, as averages of parameters (EMA) want them: own parameters, own runtime."""
    layer = make(precision="fp8", bias=True)
    inputs = make_inputs(layer.problem, 8)
    y = layer(inputs.x, inputs.topk_ids, inputs.topk_weights)
    net = torch.nn.Sequential(layer)
    other = copy.deepcopy(net)[0]
    assert other.w13 is not layer.w13
    assert torch.equal(other(inputs.x, inputs.topk_ids, inputs.topk_weights), y)
    with torch.no_grad():
        layer.w13.zero_()
    layer.close()
    assert torch.equal(other(inputs.x, inputs.topk_ids, inputs.topk_weights), y)
    assert layer(inputs.x, inputs.topk_ids, inputs.topk_weights).abs().max() == 0
    average = torch.optim.swa_utils.AveragedModel(net, use_buffers=False)
    average.update_parameters(net)
    assert torch.equal(average.module[0].w2, layer.w2)


def test_a_copy_averages_gradients_like_its_layer():
    layer, grads = make(), []
    megamoe.average_expert_gradients(layer, 2)
    inputs = make_inputs(layer.problem, 8)
    for one in (layer, copy.deepcopy(layer)):
        one(inputs.x, inputs.topk_ids, inputs.topk_weights).float().sum().backward()
        grads.append(one.w13.grad)
    assert torch.equal(*grads)
    assert grads[0].abs().max() > 0


def test_a_saved_layer_is_not_open():
    """Its number may be another layer's where it is loaded, whose gradients it would then get."""
    layer, file = make(activation="swiglu", delay_wgrad=True), io.BytesIO()
    inputs = make_inputs(layer.problem, 8)
    call = inputs.x.requires_grad_(), inputs.topk_ids, inputs.topk_weights
    layer(*call).float().sum().backward()
    layer.backward_dw()
    torch.save(layer, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert loaded._layer._runtime is None
    layer.close()
    del layer
    loaded(*call).float().sum().backward()
    loaded.backward_dw()


def test_casting_the_model_keeps_the_layer_working():
    layer = make(bias=True)
    torch.nn.init.normal_(layer.b2)
    inputs = make_inputs(layer.problem, 4)
    y = layer(inputs.x, inputs.topk_ids, inputs.topk_weights)
    layer.to(torch.bfloat16)
    assert_close(layer(inputs.x, inputs.topk_ids, inputs.topk_weights), y, relative=0.02)


@pytest.mark.parametrize("cast", ["bfloat16", "half", "float", "double"])
@pytest.mark.parametrize(
    "precision", ["fp8", "fp8_channel", "fp8xmxfp4", "bf16xmxfp4", "bf16xnvfp4"]
)
def test_casting_leaves_quantized_weights_as_they_are(precision, cast):
    """As of torchao's tensors, and of integers: their scales hold for these bits only."""
    layer = make(hidden=64, precision=precision)
    given = make_weights(layer.problem)
    if precision in ("fp8", "fp8_channel"):
        layer.load_fp8_weights(given.w13, given.w2, given.w13_scale, given.w2_scale)
    elif precision.endswith("mxfp4"):
        layer.load_mxfp4_weights(given)
    else:
        layer.load_nvfp4_weights(given)
    inputs = make_inputs(layer.problem, 4)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), layer)
    with torch.no_grad():
        y = layer(inputs.x, inputs.topk_ids, inputs.topk_weights)
        before = {name: (t, t.dtype) for name, t in layer.state_dict().items()}
        getattr(net, cast)()
        assert net[0].weight.dtype == getattr(torch, cast)
        for name, t in layer.state_dict().items():
            assert t.dtype == before[name][1]
            assert t.data_ptr() == before[name][0].data_ptr()
        assert torch.equal(layer(inputs.x, inputs.topk_ids, inputs.topk_weights), y)
    meta = layer.to("meta", dtype=torch.bfloat16)
    assert {t.device.type for t in meta.state_dict().values()} == {"meta"}
    assert meta.w13.dtype == before["w13"][1]


def on_two_ranks(rank):
    group = dist.group.WORLD
    out = {}
    for backend in ("staged", "reference"):
        layer = make(group=group, backend=backend, bias=True)
        inputs = make_inputs(layer.problem, 7 + 9 * rank)
        out[backend] = layer(inputs.x, inputs.topk_ids, inputs.topk_weights).detach()
        out["w13"] = layer.w13.detach()
        layer.close()
    different = Problem(**SHAPE, ep_size=2, rank=rank, max_tokens=64 + rank)
    try:
        make_backend("staged", different, group, device="cpu")
    except megamoe.RankMismatch as error:
        out["mismatch"] = str(error)
    return out


def test_two_ranks_equal_one():
    results = launch(on_two_ranks, 2, timeout_s=100)
    alone = make(bias=True)
    assert torch.equal(torch.cat([r["w13"] for r in results]), alone.w13)
    for rank, result in enumerate(results):
        inputs = make_inputs(alone.problem, 7 + 9 * rank, rank=rank)
        y = alone(inputs.x, inputs.topk_ids, inputs.topk_weights)
        assert_close(result["staged"], y, relative=1e-2)
        assert_close(result["reference"], y, relative=1e-2)
        assert "Problem.max_tokens is 65 on rank 1" in result["mismatch"]


def failing(rank):
    if rank == 1:
        raise ValueError("rank 1 is out of order")
    dist.barrier()


def test_launch_raises_what_a_rank_raised():
    with pytest.raises(Exception, match="rank 1 is out of order"):
        launch(failing, 2, timeout_s=60)


def test_weights_of_testing_are_valid():
    problem = Problem(**SHAPE, ep_size=2, rank=1)
    make_weights(problem).validate(problem)
