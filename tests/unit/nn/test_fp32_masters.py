"""fp32 masters of an FP8 layer: what it multiplies is quantized from fp32, and its gradients are fp32."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import megamoe
from megamoe.backends import reference as oracle
from megamoe.backends.reference.quant import quantize_experts
from megamoe.core.errors import ArgumentError, ConfigError
from megamoe.testing import launch
from megamoe.testing.compare import same_bits

SHAPE = {"hidden": 144, "intermediate": 48, "num_experts": 4, "top_k": 2, "max_tokens": 32}
BACKENDS = ["reference", "staged", "emulate"]


def make(backend="reference", dtype=torch.float32, **options):
    options = {"precision": "fp8", "init_seed": 3} | options
    return megamoe.MegaMoE(**SHAPE, backend=backend, dtype=dtype, **options)


def batch():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(24, SHAPE["hidden"], generator=generator).bfloat16()
    weights, ids = torch.randn(24, 4, generator=generator).softmax(-1).topk(2)
    dy = torch.randn(24, SHAPE["hidden"], generator=generator).bfloat16()
    return x, ids, weights, dy


def trained(layer):
    x, ids, weights, dy = batch()
    y = layer(x, ids, weights)
    y.backward(dy)
    return y.detach()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bias", [False, True])
def test_y_and_gradients_are_the_oracles(backend, bias):
    """Of weights that are quantized from fp32, as the oracle quantizes them: another rounding than from bf16."""
    layer = make(backend, bias=bias)
    y = trained(layer)
    x, ids, weights, dy = batch()
    given = [[t] for t in (x, ids, weights)]
    masters = megamoe.ExpertWeights(
        **{n: t.detach() for n, t in layer.expert_weights().named().items()}
    )
    experts = [quantize_experts(layer.problem, masters)]
    expected = oracle.forward(layer.problem, *given, experts)["y"][0]
    tolerance = {"reference": 0.0, "staged": 5e-3, "emulate": 4e-3}[backend]
    assert float((y.float() - expected.float()).norm() / expected.float().norm()) <= tolerance
    rounded = make(backend, torch.bfloat16, bias=bias)
    assert not torch.equal(trained(rounded), y)
    made = {"dw_dtype": torch.float32, "weight_gradients": "e4m3"}
    out = oracle.backward(layer.problem, [dy], *given, experts, **made)
    for name, of in (("w13", "dw13"), ("w2", "dw2"), ("b13", "db13"), ("b2", "db2")):
        p = getattr(layer, name)
        if p is None:
            continue
        assert p.grad.dtype == p.dtype == torch.float32
        wanted = out[of][0].reshape(p.shape)
        limit = {"reference": 0.0, "staged": 0.12, "emulate": 1e-2}[backend]
        assert float((p.grad - wanted).norm() / wanted.norm()) <= limit
        if backend != "staged" and name[0] == "w":
            assert not same_bits(p.grad, p.grad.bfloat16().float())  # not rounded on the way


def test_gradients_have_the_bits_of_a_main_grad():
    """Both are the kernel's fp32 sums."""
    plain, adding = make("emulate"), make("emulate", accumulate_into_main_grad=True)
    for p in (adding.w13, adding.w2):
        p.main_grad = torch.zeros_like(p, requires_grad=False)
    assert same_bits(trained(plain), trained(adding))
    assert same_bits(plain.w13.grad, adding.w13.main_grad)
    assert same_bits(plain.w2.grad, adding.w2.main_grad)
    assert adding.w13.grad is None


@pytest.mark.parametrize("products", ["bf16", "e4m3"])
@pytest.mark.parametrize("how", [True, "keep"])
def test_delayed_gradients_have_the_same_bits(how, products):
    options = {"weight_gradients": products}
    plain, late = make("emulate", **options), make("emulate", delay_wgrad=how, **options)
    trained(plain)
    trained(late)
    late.backward_dw()
    assert same_bits(plain.w13.grad, late.w13.grad)
    assert same_bits(plain.w2.grad, late.w2.grad)


def test_masters_start_unrounded():
    wide, narrow = make(), make(dtype=torch.bfloat16)
    assert same_bits(wide.w13.bfloat16(), narrow.w13.data)
    assert not same_bits(wide.w13.bfloat16().float(), wide.w13.data)


def test_checkpoints_carry_them():
    layer = make()
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    trained(layer)
    optimizer.step()
    saved = copy.deepcopy(layer.state_dict())
    assert saved["w13"].dtype == torch.float32
    other = make(init_seed=4)
    other.load_state_dict(saved)
    assert same_bits(other.w13.data, layer.w13.data)
    assert torch.equal(trained(other), trained(layer))
    assert optimizer.state[layer.w13]["exp_avg"].dtype == torch.float32
    narrow = make(dtype=torch.bfloat16)  # a checkpoint in bf16, and back
    narrow.load_state_dict(saved)
    assert same_bits(narrow.w13.data, layer.w13.data.bfloat16())
    other.load_state_dict(narrow.state_dict())
    assert same_bits(other.w13.data, narrow.w13.data.float())
    assert same_bits(layer.bfloat16().w13.data, narrow.w13.data)


@pytest.mark.parametrize("precision", ["fp8_channel", "fp8xmxfp4", "bf16xmxfp4", "bf16xnvfp4"])
def test_precisions_for_inference_take_them(precision):
    shape = SHAPE | {"hidden": 128, "intermediate": 64}
    layer = megamoe.MegaMoE(
        **shape, precision=precision, dtype=torch.float32, backend="reference", init_seed=1
    )
    x = torch.randn(5, 128).bfloat16()
    _, ids, weights, _ = batch()
    with torch.no_grad():
        y = layer(x, ids[:5], weights[:5])
    experts = [layer.expert_weights().quantized(layer.problem)]
    assert torch.equal(
        y, oracle.forward(layer.problem, [x], [ids[:5]], [weights[:5]], experts)["y"][0]
    )


def test_bf16_layers_refuse_them():
    with pytest.raises(ConfigError, match=r"dtype.*float32.*torch.bfloat16 with precision 'bf16'"):
        make(precision="bf16")
    with pytest.raises(ConfigError, match=r"dtype.*float16.*torch.bfloat16 or torch.float32"):
        make(dtype=torch.float16)
    layer = make(dtype=torch.bfloat16, precision="bf16").float()
    with pytest.raises(ArgumentError, match=r"weights.w13.dtype.*torch.float32.*bfloat16"):
        layer(*batch()[:3])


def test_both_matrices_have_one_type():
    layer = make()
    weights = megamoe.ExpertWeights(layer.w13.data, layer.w2.data.bfloat16())
    with pytest.raises(ArgumentError, match=r"weights.w2.dtype.*bfloat16.*float32"):
        megamoe.Layer(layer.problem, backend="reference")(*batch()[:3], weights)


def over_two_ranks(rank, folder):
    layer = make(group=dist.group.WORLD)
    trained(layer)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    optimizer.step()
    model, optim = get_state_dict(layer, optimizer)
    dcp.save({"model": model, "optim": optim}, checkpoint_id=folder)
    alone = make(init_seed=4)
    other = torch.optim.AdamW(alone.parameters(), lr=1e-2)
    model, optim = get_state_dict(alone, other)
    dcp.load({"model": model, "optim": optim}, checkpoint_id=folder)
    set_state_dict(alone, other, model_state_dict=model, optim_state_dict=optim)
    mine = slice(2 * rank, 2 * rank + 2)
    moments = optimizer.state[layer.w2]["exp_avg"], other.state[alone.w2]["exp_avg"][mine]
    return same_bits(layer.w13.data, alone.w13.data[mine]), same_bits(*moments), alone.w13.dtype


def test_checkpoints_of_two_ranks_carry_them(tmp_path):
    found = launch(over_two_ranks, 2, str(tmp_path / "checkpoint"), timeout_s=100)
    assert found == [(True, True, torch.float32)] * 2
