"""vLLM's own methods that make, load and run MoE layers, with a megamoe layer behind them."""

import subprocess
import sys
from dataclasses import replace
from functools import partial
from importlib.metadata import entry_points
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megamoe import ExpertWeights, Layer
from megamoe.core.config import Activation
from megamoe.core.errors import ArgumentError, ConfigError, MegaMoEError
from megamoe.testing import assert_close, compare, launch, make_weights, same_bits

pytest.importorskip("vllm", reason="vllm is missing: make libraries")
import vllm.envs  # noqa: E402
from outcomes import outcome  # noqa: E402
from vllm.plugins import DEFAULT_PLUGINS_GROUP  # noqa: E402
from vllm_models import (  # noqa: E402
    EXPERTS,
    HIDDEN,
    INTERMEDIATE,
    MoE,
    MoEActivation,
    Routes,
    config,
    config_of,
    dense,
    fp8,
    layer_of,
    parallel,
    plain_nvfp4,
    problem_of,
    share,
    silu,
    tokens,
)

from megamoe.adapters import vllm as adapter  # noqa: E402
from megamoe.adapters import vllm_plugin  # noqa: E402

# beside fp32; of FP8, x and h are quantized in 1 x 128 and weights are equal
WITHIN = {"bf16": 0.006, "fp8": 0.06, "fp8_channel": 0.06}


def gelu(gate_up, approximate):
    gate, up = gate_up.chunk(2)
    return F.gelu(gate, approximate=approximate) * up


CASES = {
    "silu": ({}, silu, {}),
    "clamp": ({"swiglu_limit": 0.7}, partial(silu, limit=0.7), {"limit": 0.7}),
    "oai": (
        {"activation": MoEActivation.SWIGLUOAI_UNINTERLEAVE, "swiglu_limit": 0.7, "swiglu_alpha": 1.702,
         "swiglu_beta": 1.0},
        partial(silu, limit=0.7, alpha=1.702, beta=1.0),
        {"limit": 0.7, "alpha": 1.702, "up_offset": 1.0},
    ),
    "gelu": ({"activation": MoEActivation.GELU}, partial(gelu, approximate="none"), "geglu"),
    "gelu_tanh": ({"activation": MoEActivation.GELU_TANH}, partial(gelu, approximate="tanh"), "geglu_tanh"),
}  # fmt: skip
OAI = partial(silu, limit=7.0, alpha=1.702, beta=1.0)
IN_TURN = {"activation": MoEActivation.SWIGLUOAI}
FP4 = {  # vLLM's method -> precision, changes, vLLM's activation, ours, how its parameters are named
    "GptOssMxfp4MoEMethod": ("bf16xmxfp4", IN_TURN | {"has_bias": True}, OAI, "swiglu_oai"),
    "Mxfp4MoEMethod": (
        *("fp8xmxfp4", {"swiglu_limit": 0.7}, partial(silu, limit=0.7)),
        Activation("clamped_swiglu", limit=0.7),
    ),
    "ModelOptNvFp4FusedMoE": ("bf16xnvfp4", {}, silu, "swiglu"),
    "CompressedTensorsW4A4Nvfp4MoEMethod": ("bf16xnvfp4", {}, silu, "swiglu"),
}


@pytest.mark.parametrize("precision", WITHIN)
@pytest.mark.parametrize("case", CASES)
def test_layers_compute_what_vllm_states(installed, case, precision):
    changes, activation, ours = CASES[case]
    call = tokens()
    y = layer_of(precision=precision, **changes)(*call)
    assert y.dtype == torch.bfloat16
    assert_close(y.float(), dense(call, activation, precision), relative=WITHIN[precision])
    assert not y[3].any()  # all of its ids are -1
    assert y[5].any()
    if not isinstance(ours, str):
        ours = Activation("clamped_swiglu", **ours) if ours else "swiglu"
    problem = problem_of(precision=precision, activation=ours)
    layer = Layer(problem, "alone", backend="staged")
    assert same_bits(y, layer(*call, make_weights(problem)))


@pytest.mark.parametrize("method", FP4)
def test_fp4_experts_are_read_in_place(installed, method):
    precision, changes, activation, ours = FP4[method]
    problem = problem_of(precision=precision, activation=ours, bias=changes.get("has_bias", False))
    weights = make_weights(problem)
    if "nvfp4" in precision:  # vLLM has one outer scale for gate and up
        (s13, _), (s2, _) = (
            plain_nvfp4(scale, planes, *sizes)
            for scale, planes, *sizes in (
                (weights.w13_scale, 2, INTERMEDIATE, HIDDEN),
                (weights.w2_scale, 1, HIDDEN, INTERMEDIATE),
            )
        )
        outer = torch.full((EXPERTS,), 2.0**-9)
        made = ExpertWeights.from_nvfp4(weights.w13, weights.w2, (s13, s2), (outer, outer))
        weights = replace(made, w13=weights.w13)
    if problem.bias:
        b13, b2 = (b.bfloat16().float() for b in (weights.b13, weights.b2))
        weights = replace(weights, b13=b13, b2=b2)
    moe = MoE(config_of(**changes), precision, strategies=method[:1] == "M")
    assert type(moe.method).__name__ == method
    names = "w13_weight", "w2_weight"
    before = [getattr(moe, n, getattr(moe, f"{n}_packed", None)).data_ptr() for n in names]
    moe.load(weights)
    assert [getattr(moe, n).data_ptr() for n in names] == before
    for name in ("w13", "w2"):  # vLLM's parameters, in the kernel's order, which is kept once
        scale = getattr(moe, f"{name}_weight_scale")
        assert torch.equal(scale.data, getattr(weights, f"{name}_scale"))
    quant = moe.method.moe_kernel.fused_experts.quant_config
    assert quant.w1_scale is moe.w13_weight_scale
    call = tokens()
    y = moe(*call)
    layer = Layer(problem, "alone", backend="staged")
    assert same_bits(y, layer(*call, weights))
    expected = dense(call, activation, precision, bias=problem.bias, weights=weights)
    assert_close(y.float(), expected, relative=0.06 if "fp8" in precision else 0.006)
    moe.w13_weight.data[0].zero_()  # a write in place, which the next call sees
    assert compare(moe(*call).float(), expected).relative > 0.1


def test_rows_of_gate_and_up_in_turn(installed):
    """BF16 experts of GPT-OSS, such as fine-tuned ones."""
    call = tokens()
    y = layer_of(has_bias=True, **IN_TURN)(*call)
    assert_close(y.float(), dense(call, OAI, bias=True), relative=WITHIN["bf16"])


@pytest.mark.parametrize("precision", ["bf16", "fp8"])  # others have none in vLLM
def test_biases(installed, precision):
    call = tokens()
    y = layer_of(precision=precision, has_bias=True)(*call)
    expected = dense(call, precision=precision, bias=True)
    assert_close(y.float(), expected, relative=WITHIN[precision])
    assert compare(expected, dense(call, precision=precision)).relative > 2 * WITHIN[precision]


def test_weights_of_one_expert_on_the_input(installed):
    moe = layer_of(experts_per_token=1)
    call = tokens(top_k=1)
    output = moe(*call)
    moe.apply_router_weight_on_input = True
    y = moe(*call)
    assert_close(y.float(), dense(call, on_input=True, top_k=1), relative=WITHIN["bf16"])
    assert compare(y.float(), output.float()).relative > 0.1
    several = layer_of()
    several.apply_router_weight_on_input = True
    with pytest.raises(ArgumentError, match="apply_router_weight_on_input is True with top_k 3"):
        several(*tokens())


@pytest.mark.parametrize("precision", WITHIN)
def test_layers_of_a_model_share_one_and_writes_are_seen(installed, precision):
    first, second = (layer_of(precision=precision, seed=seed) for seed in range(2))
    call = tokens()
    y, other = first(*call), second(*call)
    assert compare(other, y).relative > 0.5
    assert same_bits(first(*call), y)
    assert len(installed.layers) == 1
    for mine, theirs in zip(first.parameters(), second.parameters(), strict=True):
        mine.data.copy_(theirs)  # new weights, in place
    assert same_bits(first(*call), other)
    assert first(*(t[:0] for t in call)).shape == (0, HIDDEN)


def _over_two_ranks(rank, precision):
    share(dist.group.WORLD)
    made = adapter.install(backend="staged")
    moe, call = layer_of(rank, 2, precision), tokens(20 if rank else 0, seed=5)
    assert moe.method.moe_kernel.output_is_reduced()  # or vLLM would add up finished sums
    y = moe(*call)
    errors = []
    for x in (call[0].float() if rank else call[0], call[0].repeat(4, 1)):
        try:
            ids, weights = (t.repeat(len(x) // max(len(t), 1), 1) for t in call[1:])
            moe(x, ids, weights)
        except MegaMoEError as raised:
            errors.append(str(raised))
    again = moe(*call)
    made.close()
    return y, call, same_bits(again, y), errors


@pytest.mark.parametrize("precision", WITHIN)
def test_experts_over_two_ranks(precision):
    (none, _, _, others), (y, call, again, errors) = launch(_over_two_ranks, 2, precision)
    assert none.shape == (0, HIDDEN)  # a rank without tokens makes the call, too
    assert again
    expected = dense(call, precision=precision)
    assert_close(y.float(), expected, relative=WITHIN[precision])
    assert "x.dtype is torch.float32, expected torch.bfloat16" in errors[0]
    assert "x.shape[0] is 80, expected at most max_tokens = 64" in errors[1]
    assert all("rank 1 raised " in error for error in others)
    assert len(others) == len(errors) == 2


class Half(torch.nn.Module):
    """Half of a shared expert, whose sums tensor parallelism completes."""

    def forward(self, x):
        return 0.5 * x


def _by_vllms_factory(rank, tensor):
    whole = parallel(rank, tensor)
    made = adapter.install(backend="staged")
    counts = [20, 20] if tensor else [7, 20]
    call = tokens(counts[rank], seed=5 if tensor else rank)
    everywhere = None if tensor else torch.tensor(counts)
    found = {}
    for name, options in {
        "plain": {},
        "shared": {"shared": Half()},
        "scaled": {
            "shared": Half(),
            "routed_scaling_factor": 2.5,
            "apply_routed_scale_to_output": True,
        },
    }.items():
        moe = Routes(whole, make_weights(problem_of(rank, 2)), **options)
        assert isinstance(
            moe.runner.routed_experts.quant_method.moe_kernel.fused_experts, adapter.Experts
        )
        found[name] = moe(*call, everywhere=everywhere)
    made.close()
    return call, found


@pytest.mark.parametrize("tensor", [True, False], ids=["tensor", "data"])
def test_layers_that_vllms_own_factory_makes(tensor):
    """Neither rank's results are added to the other's: all of vLLM's way but the router is run."""
    for call, found in launch(_by_vllms_factory, 2, tensor, timeout_s=240):
        routed, shared = dense(call), call[0].float() * (1.0 if tensor else 0.5)
        expected = {"plain": routed, "shared": routed + shared, "scaled": 2.5 * routed + shared}
        for name, y in found.items():
            assert_close(y.float(), expected[name], relative=WITHIN["bf16"], name=name)


def test_ranks_that_may_change_are_refused(installed):
    with (
        mock.patch.object(config.parallel_config, "enable_elastic_ep", True),
        pytest.raises(ConfigError, match="elastic expert parallelism"),
    ):
        MoE(config_of())


WRONG_CALLS = {  # an attribute of vLLM's module on one rank, which this adapter refuses by itself
    "activation": (MoEActivation.GELU, "activation is MoEActivation.GELU, expected"),
    "global_num_experts": (EXPERTS + 1, "global_num_experts is 7, expected 6"),
    "apply_router_weight_on_input": (True, "apply_router_weight_on_input is True with top_k 3"),
    "expert_map": (None, "expert_map is that of experts [1, 3, 5], expected 3..5"),
}


def _refused_by_one(rank, name):
    share(dist.group.WORLD)
    made = adapter.install(backend="staged")
    moe, call, found = layer_of(rank, 2), tokens(), []
    right, wrong = getattr(moe, name), WRONG_CALLS[name][0]
    if name == "expert_map":
        wrong = MoE(config_of(rank, 2), placement="round_robin").expert_map
    for value in (wrong if rank else right, right):
        setattr(moe, name, value)
        found.append(outcome(lambda: moe(*call)))
    made.close()
    return found


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_what_one_rank_refuses_raises_on_all(name):
    (told, well), (own, also) = launch(_refused_by_one, 2, name, timeout_s=60)
    assert told[0] == "PeerFault", told
    assert own[0] in ("ArgumentError", "ConfigError")
    assert WRONG_CALLS[name][1] in own[1]
    assert well == also == (None, "")  # a later call is as good as ever


REFUSED = {
    "kernel does not support parallel config": {"tp_size": 2},
    "batched_activation_format": {"all2all_backend": "deepep_low_latency", "dp_size": 2, "ep_size": 2, "use_ep": True},
    "torch.float16": {"in_dtype": torch.float16},
    "SITU activation": {"activation": MoEActivation.SITU},
    "LoRA": {"is_lora_enabled": True},
    "skip_final_all_reduce": {"skip_final_all_reduce": True},
    "hidden is 250, expected a multiple": {"hidden_dim": 250},
    "top_k is 99, expected 1..": {"experts_per_token": 99},
    "max_tokens is 2147483648, expected 1..": {"max_num_tokens": 2**31},
}  # fmt: skip


@pytest.mark.parametrize("reason", REFUSED)
def test_layers_that_no_layer_computes_are_refused(installed, reason):
    wanted = reason if reason != "batched_activation_format" else "kernel does not support"
    with pytest.raises(ConfigError) as caught:
        MoE(config_of(**REFUSED[reason]))
    assert wanted in str(caught.value)


def test_other_scales_placements_and_calls_are_refused(installed):
    for precision in ("fp8", "fp8_channel"):
        with pytest.raises(ConfigError, match="gate and up rows in turn share FP8 scales"):
            MoE(config_of(**IN_TURN), precision)
    for options in ({"block": (64, 128)}, {"block": (128, 64)}):
        with pytest.raises(ConfigError, match="quantization scheme"):
            MoE(config_of(), "fp8", **options)
    with pytest.raises(ConfigError, match="quantization scheme"):
        MoE(config_of(), "fp8_channel", strategies=("tensor", "tensor"))
    moe = layer_of(precision="fp8")
    quant = moe.method.moe_quant_config
    with (
        mock.patch.object(type(quant), "block_shape", [128, 64]),  # as compressed-tensors lets it
        pytest.raises(ConfigError, match=r"block shape of weights is \[128, 64\], expected"),
    ):
        adapter.Experts(moe.moe_config, quant)
    moe = layer_of()
    call = tokens()
    hooked = moe.method.moe_kernel.fused_experts
    hooked.post_gemm2_hook = print
    with pytest.raises(ArgumentError, match="post_gemm2_hook is set, expected None"):
        moe(*call)
    hooked.post_gemm2_hook = None
    moe.activation = MoEActivation.GELU
    with pytest.raises(ArgumentError, match="activation is MoEActivation.GELU, expected"):
        moe(*call)
    moe.activation, moe.global_num_experts = MoEActivation.SILU, EXPERTS + 1
    with pytest.raises(ArgumentError, match="global_num_experts is 7, expected 6"):
        moe(*call)


def test_invariance_to_the_batch_is_promised_for_the_kernel_only(installed):
    assert not adapter.Experts._supports_batch_invariance()
    installed.layers.backend = "mega"
    assert adapter.Experts._supports_batch_invariance()
    assert not adapter.Experts._supports_current_device()  # a CPU


def test_the_plugin_installs_only_where_it_is_named(monkeypatch):
    before = fp8.select_fp8_moe_backend
    for named in (None, ["other"]):
        monkeypatch.setattr(vllm.envs, "VLLM_PLUGINS", named, raising=False)
        vllm_plugin.plugin()
        assert fp8.select_fp8_moe_backend is before
    monkeypatch.setattr(vllm.envs, "VLLM_PLUGINS", ["other", "megamoe"], raising=False)
    vllm_plugin.plugin()
    vllm_plugin.plugin()
    assert fp8.select_fp8_moe_backend is not before
    with pytest.raises(ConfigError, match="kernel does not support current device"):
        MoE(config_of())
    with pytest.raises(ConfigError, match=r"install\(\) is called again"):
        adapter.install()
    adapter.installed().uninstall()
    assert fp8.select_fp8_moe_backend is before
    (found,) = entry_points(group=DEFAULT_PLUGINS_GROUP, name="megamoe")  # where the library looks
    assert found.load() is vllm_plugin.plugin


def test_without_its_name_the_plugin_imports_nothing_of_vllm():
    program = """
import sys
sys.modules["vllm"] = vllm = type(sys)("vllm")
vllm.__path__ = []
sys.modules["vllm.envs"] = vllm.envs = type(sys)("vllm.envs")
vllm.envs.VLLM_PLUGINS = None
from megamoe.adapters.vllm_plugin import plugin
plugin()
assert "megamoe.adapters.vllm" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_wrong_options_and_another_vllm_are_named(monkeypatch):
    for options in ({"backend": "magma"}, {"reserve_sm": 3}):
        with pytest.raises(ConfigError, match="magma|reserve_sm"):
            adapter.install(**options)
    monkeypatch.delattr(fp8, "make_fp8_moe_kernel")
    with pytest.raises(ConfigError, match="fp8.make_fp8_moe_kernel is missing, expected vLLM 0.33"):
        adapter.install()
    assert adapter.installed() is None
