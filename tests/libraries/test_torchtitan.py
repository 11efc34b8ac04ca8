"""MoE modules and models of torchtitan: its own experts, and a megamoe layer over the same parameters."""

import json
import re
from pathlib import Path
from unittest import mock

import pytest
import torch
from copies import watched

import megamoe
from megamoe.core.config import ACTIVATIONS, Activation
from megamoe.core.errors import ArgumentError, ConfigError
from megamoe.formats.weights import MASTERS
from megamoe.testing import assert_close, same_bits

pytest.importorskip("torchtitan", reason="torchtitan is missing: make libraries")
from torchtitan.config.override import (  # noqa: E402
    OverrideConfig,
    apply_overrides,
    parse_cli_imports,  # noqa: E402
)
from torchtitan.models.common.moe import GroupedExperts  # noqa: E402
from torchtitan_models import (  # noqa: E402
    OVERRIDE,
    loss_of,
    moe_config,
    overridden,
    pair_of,
    qwen3_config,
    results,
    rows,
)

from megamoe.adapters import torchtitan as adapter  # noqa: E402
from megamoe.adapters import torchtitan_experts  # noqa: E402
from megamoe.adapters.torchtitan_experts import activation_of, weights_of  # noqa: E402

MODULES = {
    "dense": {},
    "shared": {},
    "gpt-oss": {},
    "dense top 4": {"top_k": 4, "score_func": "softmax", "route_norm": True, "route_scale": 2.5},
}


def compare(theirs, ours, x, dy):
    expected, found = results(theirs, x, dy), results(ours, x, dy)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert value.any(), name
        assert found[name].dtype == value.dtype
        assert_close(found[name], value, relative=0.02, name=name)


@pytest.mark.parametrize("name", MODULES)
def test_modules_are_those_of_torchtitan(name):
    theirs, ours = pair_of(name.split()[0], **MODULES[name])
    assert type(ours.routed_experts) is adapter.MegaRoutedExperts
    compare(theirs, ours, rows(), rows(seed=2))
    assert torch.equal(ours.tokens_per_expert_E, theirs.tokens_per_expert_E)


def test_parameters_of_fp32():
    x, dy = rows(dtype=torch.float32), rows(seed=2, dtype=torch.float32)
    compare(*pair_of("dense", torch.float32), x, dy)
    _, ours = pair_of("gpt-oss", torch.float32)  # torchtitan's own wants bf16 there
    found = results(ours, x, dy)
    assert all(t.dtype == torch.float32 and t.isfinite().all() for t in found.values())


def test_calls_of_other_sizes():
    theirs, ours = pair_of()
    for length in (1, 17, 32):
        with torch.no_grad():
            assert_close(ours(rows(length)), theirs(rows(length)), relative=0.02)
    assert ours(rows(0)).shape == (2, 0, 64)
    with pytest.raises(ArgumentError, match="at most max_tokens = 64"):
        ours(rows(33))


def test_parameters_are_read_in_place_where_they_can_be():
    _, ours = pair_of("gpt-oss")
    inner = ours.routed_experts.inner_experts
    weights = weights_of(inner)
    assert weights.w13.data_ptr() == inner.mlp1_weight_EGD.data_ptr()
    assert weights.w2.data_ptr() == inner.mlp2_weight_EDF.data_ptr()
    _, ours = pair_of()
    inner = ours.routed_experts.inner_experts
    assert weights_of(inner).w13.data_ptr() == inner.w1_EFD.data_ptr()
    before = ours(rows())
    inner.w3_EFD.data = inner.w3_EFD.data.clone()  # as FSDP gathers it
    assert weights_of(inner).w13.data_ptr() != inner.w1_EFD.data_ptr()
    assert same_bits(ours(rows()), before)


@pytest.mark.parametrize("kind", ["tied", "apart", "fp32", "gpt-oss"])
def test_experts_are_quantized_once_a_step(kind):
    dtype = torch.float32 if kind == "fp32" else torch.bfloat16
    name = kind if kind == "gpt-oss" else "dense"
    theirs, ours = pair_of(name, dtype, options={"precision": "fp8"})
    inner = ours.routed_experts.inner_experts
    if kind == "apart":
        inner.w3_EFD.data = inner.w3_EFD.data.clone()
    if kind not in ("fp32", "gpt-oss"):  # torchtitan's own wants bf16 there
        with torch.no_grad():
            assert_close(ours(rows()), theirs(rows()), relative=0.1)
    optimizer = torch.optim.AdamW(ours.parameters(), lr=1e-2, fused=True)
    with watched() as seen:
        ours.load_state_dict(theirs.state_dict())
        for _ in range(2):
            for micro in range(3):
                ours(rows(seed=micro, dtype=dtype)).float().square().sum().backward()
            optimizer.step()
        with torch.no_grad():
            ours(rows(dtype=dtype))
            ours(rows(dtype=dtype))
            for p in inner.parameters():
                p.mul_(-1)
            ours(rows(dtype=dtype))
            ours.init_states()
            ours(rows(dtype=dtype))
    assert seen == {"stale": 0, "q": 2 * (1 + 2 + 1 + 1)}


def test_fp32_masters_are_quantized_without_a_bf16_copy():
    """FP8 reads them as they are, and the step quantizes them; their gradients are sums before any rounding."""
    options = {"precision": "fp8", "backend": "reference"}
    _, ours = pair_of(dtype=torch.float32, options=options)
    inner = ours.routed_experts.inner_experts
    with torch.no_grad():
        inner.w2_EDF.mul_(1 + 2**-12)  # to numbers that bf16 has not
    optimizer = torch.optim.AdamW(ours.parameters(), lr=1e-2, fused=True)
    megamoe.after_step(optimizer, ours)
    x, of_calls, of_steps = rows(dtype=torch.float32), [], []
    with watched() as seen:
        for _ in range(2):
            before = seen["q"]
            for _ in range(2):
                ours(x).square().sum().backward()
            of_calls.append(seen["q"] - before)
            optimizer.step()
            of_steps.append(seen["q"] - before - of_calls[-1])
    assert seen["stale"] == 0
    assert (of_calls, of_steps) == ([2, 0], [2, 2])
    layer = ours.routed_experts._layer
    expected = weights_of(inner, MASTERS).quantized(layer.problem)
    assert same_bits(layer._runtime.cache._entries["w2"].scale, expected.w2_scale)
    assert not same_bits(expected.w2_scale, weights_of(inner).quantized(layer.problem).w2_scale)
    for p in (inner.w1_EFD, inner.w2_EDF):
        assert p.grad.dtype == torch.float32
        assert not torch.equal(p.grad, p.grad.bfloat16().float())


def test_checkpointed_modules():
    _, ours = pair_of()
    expected = results(ours, rows(), rows(seed=2))
    forward = ours.forward
    ours.forward = lambda x: torch.utils.checkpoint.checkpoint(forward, x, use_reentrant=False)
    for name, value in results(ours, rows(), rows(seed=2)).items():
        assert_close(value, expected[name], relative=1e-6, name=name)


def test_compiled_modules():
    _, ours = pair_of()
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="make one before torch.compile"):
        compiled(rows())
    expected = results(ours, rows(), rows(seed=2))
    torch.compiler.reset()
    found = results(compiled, rows(), rows(seed=2))
    for name, value in expected.items():
        assert_close(
            found[name if name in "xy" else f"_orig_mod.{name}"], value, relative=1e-6, name=name
        )


def test_models_train_as_torchtitan_does():
    curves, states = [], []
    for ours in (False, True):
        model = qwen3_config(ours).build()
        torch.manual_seed(0)
        with torch.no_grad():
            model.init_weights()
        states.append(set(model.state_dict()))
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        curve = []
        for _ in range(6):
            optimizer.zero_grad()
            loss = loss_of(model)
            loss.backward()
            optimizer.step()
            curve.append(loss.item())
        curves.append(curve)
    assert states[0] == states[1]
    assert curves[0][-1] < 0.9 * curves[0][0]
    assert curves[1] == pytest.approx(curves[0], rel=0.02)
    adapter.close(model)


def test_the_command_of_the_document():
    page = (Path(__file__).resolve().parents[2] / "docs" / "adapters.md").read_text()
    (token,) = re.findall(rf"--override\.imports '({re.escape(OVERRIDE)}=.*)'", page)
    assert token in adapter.__doc__
    (entry,) = parse_cli_imports([token])
    config = qwen3_config(False)
    said = apply_overrides(OverrideConfig(imports=[entry]), config)
    assert len(said) == 2
    experts = config.layers[1].moe.routed_experts
    assert experts.max_tokens == json.loads(token.split("=", 1)[1])["max_tokens"] == 8192
    assert experts.backend == "auto"


class Quantized(GroupedExperts):
    """As torchtitan's converters make them."""

    from dataclasses import dataclass

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        recipe: str = "fp8"


def test_experts_that_a_layer_does_not_compute_are_refused():
    config = moe_config()
    config.routed_experts.inner_experts = Quantized.Config(dim=64, hidden_dim=48, num_experts=6)
    with pytest.raises(ConfigError, match="inner_experts is Quantized.Config, expected GroupedEx"):
        overridden(config)
    config = overridden(moe_config())[0]
    config.routed_experts.inner_experts = Quantized.Config(dim=64, hidden_dim=48, num_experts=6)
    with pytest.raises(ConfigError, match="inner_experts is Quantized.Config, expected GroupedEx"):
        config.build()
    _, ours = pair_of()
    inner = ours.routed_experts.inner_experts
    handle = inner.register_forward_pre_hook(lambda *_: None)
    with pytest.raises(ConfigError, match="experts is hooks of GroupedExperts, expected none"):
        ours(rows())
    handle.remove()
    inner.low_rank = torch.nn.Linear(4, 4)
    with pytest.raises(ConfigError, match="experts is Linear, expected no modules"):
        ours(rows())
    del inner.low_rank
    with (
        mock.patch("spmd_types.is_type_checking", return_value=True),
        pytest.raises(ConfigError, match="debug.spmd_typechecking is True"),
    ):
        ours(rows())
    half = {n: torch.nn.Parameter(getattr(inner, n)[:, :32]) for n in ("w1_EFD", "w3_EFD")}
    half["w2_EDF"] = torch.nn.Parameter(inner.w2_EDF[..., :32].contiguous())
    for name, parameter in half.items():
        setattr(inner, name, parameter)
    with pytest.raises(ConfigError, match=r"is \(6, 32\), expected \(6, 48\): no tensor-parallel"):
        ours(rows())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0, expected 1.."),
        ({"precision": "fp9"}, "precision is 'fp9', expected bf16 or fp8"),
        ({"backend": "magma"}, "backend is 'magma', expected auto, mega"),
        ({"reserve_sm": 3}, "option is 'reserve_sm', expected one of"),
    ],
)
def test_wrong_options_are_named_when_a_module_is_built(options, message):
    config = overridden(moe_config(), **options)[0]
    with pytest.raises(ConfigError, match=re.escape(message)):
        config.build()


def test_activations_are_those_of_the_experts():
    dense, clamped = (moe_config(k).routed_experts.inner_experts for k in ("dense", "gpt-oss"))
    assert activation_of(dense) == ACTIVATIONS["swiglu"]
    expected = Activation("clamped_swiglu", alpha=1.702, limit=4.7, up_offset=1.0)
    assert activation_of(clamped) == expected
    with (
        mock.patch.object(
            torchtitan_experts, "gpt_oss_swiglu", lambda x, limit: x[..., ::2] * x[..., 1::2]
        ),
        pytest.raises(ConfigError, match="activation is that of GptOssGroupedExperts"),
    ):
        activation_of(clamped)
