"""SGLang's own functions that build and run FP8 experts on Hopper, with a megamoe layer behind them."""

import sys
from dataclasses import replace
from functools import partial
from importlib.metadata import entry_points

import pytest
import torch
import torch.distributed as dist

from megamoe import ExpertWeights, Layer
from megamoe.core.config import Activation
from megamoe.core.errors import ArgumentError, ConfigError, MegaMoEError
from megamoe.testing import assert_close, compare, launch, make_weights, same_bits

pytest.importorskip("sglang", reason="sglang is missing: make libraries")
from outcomes import outcome  # noqa: E402
from sglang_models import (  # noqa: E402
    EXPERTS,
    GENERAL_PLUGINS_GROUP,
    HIDDEN,
    INTERMEDIATE,
    METHODS,
    TOP_K,
    DeepGemmRunnerCore,
    MoeRunnerConfig,
    args_of,
    build,
    built,
    by_channel,
    chosen,
    dense,
    envs,
    experts_of,
    flagged,
    mega_moe,
    mega_moe_sm90,
    native,
    packed,
    problem_of,
    run,
    schemes,
    tokens,
)

from megamoe.adapters import sglang as adapter  # noqa: E402

FP8 = 0.08  # beside fp32: x and h are quantized in 1 x 128, weights are equal


pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture
def installed(installed):
    yield installed
    mega_moe._MEGA_MOE_SYMM_BUFFER.clear()


def test_tokens_are_what_sglang_computes(installed):
    call = tokens()
    y = run(built(), call, dist.group.WORLD)
    assert y.dtype == torch.bfloat16
    assert_close(y.float(), native(call), relative=FP8)
    assert_close(native(call), dense(call), relative=1e-5)
    assert not y[3].any()  # all of its ids are -1
    assert y[5].any()


@pytest.mark.parametrize("clamp", [None, 0.3])
def test_a_call_is_the_layer_with_sglangs_weights_clamp_and_factor(installed, clamp):
    call = x, topk_ids, topk_weights = tokens()
    experts, plain = built(), experts_of()
    options = {"activation_clamp": clamp, "routed_scaling_factor": 2.5}
    y = run(experts, call, dist.group.WORLD, **options)
    assert_close(y.float(), dense(call, clamp, 2.5), relative=FP8)
    problem = problem_of()
    if clamp is not None:
        assert compare(y.float(), dense(call, None, 2.5)).relative > 2 * FP8
        activation = Activation("clamped_swiglu", limit=clamp)
        problem = type(problem)(**vars(problem) | {"activation": activation})
    weights = ExpertWeights(
        plain.w13_weight.data, plain.w2_weight.data,
        w13_scale=plain.w13_weight_scale_inv.data, w2_scale=plain.w2_weight_scale_inv.data,
    )  # fmt: skip
    layer = Layer(problem, "alone", backend="staged")
    assert same_bits(y, layer(x, topk_ids, topk_weights * 2.5, weights))


def test_weights_stay_where_they_are_and_writes_are_seen(installed):
    experts = experts_of()
    place, bits = experts.w13_weight.data_ptr(), experts.w13_weight.data.clone()
    mega_moe_sm90.build_sm90_mega_moe_experts_weights(experts)
    mega_moe_sm90.build_sm90_mega_moe_experts_weights(experts)  # as SGLang does: once
    assert mega_moe.is_mega_moe_experts_ready(experts)
    assert experts.w13_weight.data_ptr() == place
    assert experts.mega_l1_weights[0].data_ptr() == place
    assert torch.equal(experts.w13_weight.data.view(torch.uint8), bits.view(torch.uint8))
    call = tokens()
    before = run(experts, call, dist.group.WORLD)
    for name in ("w13_weight", "w13_weight_scale_inv", "w2_weight", "w2_weight_scale_inv"):
        parameter = getattr(experts, name).data  # as expert balancing: two experts change places
        parameter.copy_(parameter[torch.tensor([1, 0, 2, 3, 4, 5])].clone())
    swapped = torch.tensor([1, 0, 2, 3, 4, 5, -1], dtype=torch.int32)[call[1].long()]
    assert same_bits(run(experts, (call[0], swapped, call[2]), dist.group.WORLD), before)
    assert not torch.equal(run(experts, call, dist.group.WORLD), before)


@pytest.mark.parametrize("kind", ["block", *METHODS])
def test_parameters_that_moved_are_read_when_loading_ends_again(installed, kind):
    """As a loader leaves them that puts new tensors in their place."""
    make = built if kind == "block" else partial(by_channel, METHODS[kind]())
    experts, other, call = make(), make(seed=1), tokens()
    before, expected = (run(e, call, dist.group.WORLD) for e in (experts, other))
    for mine, theirs in zip(experts.parameters(), other.parameters(), strict=True):
        mine.data = theirs.data.clone()
    if kind == "block":
        mega_moe_sm90.build_sm90_mega_moe_experts_weights(experts)
    else:
        with chosen("megamoe"):
            METHODS[kind]().process_weights_after_loading(experts)
    assert same_bits(run(experts, call, dist.group.WORLD), expected)
    assert compare(expected, before).relative > 0.5


def test_layers_of_a_model_and_batches_share_one_buffer(installed):
    experts, other, call = built(), built(seed=1), tokens()
    y = run(experts, call, dist.group.WORLD)
    assert compare(run(other, call, dist.group.WORLD), y).relative > 0.5
    assert same_bits(run(experts, call, dist.group.WORLD), y)
    none = x, *_ = tuple(t[:0] for t in call)
    assert run(experts, none, dist.group.WORLD).shape == x.shape
    empty = run(experts, (x, None, None), dist.group.WORLD)
    assert empty.shape == (0, HIDDEN)
    part = run(experts, tuple(t[:7] for t in call), dist.group.WORLD)
    assert same_bits(part, y[:7])
    assert len(mega_moe._MEGA_MOE_SYMM_BUFFER) == 1


PACKED = {"fp8xmxfp4": FP8, "bf16xnvfp4": 0.01}


@pytest.mark.parametrize("precision", PACKED)
def test_fp4_experts_are_read_in_place(installed, precision):
    experts, call = packed(precision), tokens()
    places = [experts.w13_weight.data_ptr(), experts.w2_weight.data_ptr()]
    build(experts)
    assert mega_moe.is_mega_moe_experts_ready(experts)
    kept = experts.mega_l1_weights[0], experts.mega_l2_weights[0]
    assert [t.data_ptr() for t in kept] == places
    problem = problem_of(precision=precision)
    weights = make_weights(problem)
    scales = experts.mega_l1_weights[1], experts.mega_l2_weights[1]
    assert all(map(torch.equal, scales, (weights.w13_scale, weights.w2_scale)))
    assert sum(p.nbytes for p in experts.parameters()) < 1.2 * sum(w.nbytes for w in kept)
    y = run(experts, call, dist.group.WORLD)
    expected = dense(call, precision=precision)
    assert_close(y.float(), expected, relative=PACKED[precision])
    assert same_bits(y, Layer(problem, "alone", backend="staged")(*call, weights))
    clamped = run(experts, call, dist.group.WORLD, activation_clamp=0.3)
    assert_close(clamped.float(), dense(call, 0.3, precision=precision), relative=PACKED[precision])
    experts.w2_weight.data[0].zero_()
    changed = run(experts, call, dist.group.WORLD)
    assert compare(changed.float(), expected).relative > 2 * PACKED[precision]


def test_fp4_experts_of_other_formulas_and_scales_are_refused(installed):
    with pytest.raises(ConfigError, match="gemm1_alpha is 1.702, expected None"):
        build(packed("bf16xnvfp4", gemm1_alpha=1.702))
    experts = packed("fp8xmxfp4")
    experts.w2_weight_scale_inv.data[0, 0, 0] = 3.0
    with pytest.raises(ConfigError, match="scales of MXFP4 experts is others, expected powers of"):
        build(experts)


def _over_two_ranks(rank):
    made = adapter.install(backend="staged")
    experts, call = built(rank, 2), tokens(20 if rank else 0, seed=5)
    y = run(experts, call, dist.group.WORLD, activation_clamp=10.0, routed_scaling_factor=2.5)
    try:
        bad = call[0].float() if rank else call[0]
        run(experts, (bad, *call[1:]), dist.group.WORLD, activation_clamp=10.0)
        error = "none"
    except MegaMoEError as raised:
        error = str(raised)
    made.close()
    return y, call, error


def test_experts_over_two_ranks():
    (none, _, other), (y, call, error) = launch(_over_two_ranks, 2)
    assert none.shape == (0, HIDDEN)
    assert_close(y.float(), dense(call, 10.0, 2.5), relative=FP8)
    assert "x.dtype is torch.float32, expected torch.bfloat16" in error
    assert "rank 1 raised " in other


def _refused_by_one(rank):
    """Rank 1 alone makes calls that this adapter refuses by itself: before a layer is made, and behind that."""
    made = adapter.install(backend="staged")
    deep_gemm, experts, (x, ids, weights) = sys.modules["deep_gemm"], built(rank, 2), tokens()
    buffer = deep_gemm.get_symm_buffer_for_mega_moe(dist.group.WORLD, *SIZES)
    pairs = experts.mega_l1_weights, experts.mega_l2_weights

    def call(staged, first, **options):
        for count, group_size in staged:
            deep_gemm.mega_moe_pre_dispatch_sm90(
                x, ids, weights, *[buffer] * 4, num_tokens=count, group_size=group_size
            )
        deep_gemm.fp8_mega_moe(torch.empty_like(x), first, pairs[1], buffer, **options)

    good, found = ([(20, 128)], pairs[0]), []
    for wrong, options in (
        (([(21, 128)], pairs[0]), {}),
        (([(20, 32)], pairs[0]), {}),
        (([], pairs[0]), {}),
        (([(20, 128)], tuple(pairs[0])), {}),
        (good, {"recipe": (1, 1, 32)}),
    ):
        found.append(
            outcome(lambda w=wrong, o=options: call(*(w if rank else good), **(o if rank else {})))
        )
        found.append(outcome(lambda: call(*good)))
    found.append(outcome(lambda: call(*good, activation_clamp=-1.0 if rank else 1.0)))
    found.append(outcome(lambda: call(*good, activation_clamp=1.0)))
    made.close()
    return found


def test_what_one_rank_refuses_raises_on_all():
    there, here = launch(_refused_by_one, 2, timeout_s=60)
    assert there[1::2] == here[1::2] == [(None, "")] * 6  # a later call is as good as ever
    assert [kind for kind, _ in there[::2]] == ["PeerFault"] * 6, there
    for (_, error), expected in zip(
        here[::2],
        ("num_tokens is 21", "group_size is 32", "buffer is empty", "l1_weights is interleaved",
         "recipe is", "activation.limit is -1.0"),
        strict=True,
    ):  # fmt: skip
        assert expected in error


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("clamp", [None, 0.3])
def test_experts_by_channel_are_the_layer_of_fp8_channel(installed, name, clamp):
    call = x, topk_ids, topk_weights = tokens()
    experts = by_channel(METHODS[name]())
    assert mega_moe.is_mega_moe_experts_ready(experts)
    y = run(experts, call, dist.group.WORLD, activation_clamp=clamp, routed_scaling_factor=2.5)
    assert_close(y.float(), dense(call, clamp, 2.5, "fp8_channel"), relative=FP8)
    activation = Activation("clamped_swiglu", limit=clamp) if clamp else Activation("swiglu")
    problem = replace(problem_of(precision="fp8_channel"), activation=activation)
    scales = {f"{n}_scale": getattr(experts, f"{n}_weight_scale").data for n in ("w13", "w2")}
    weights = ExpertWeights(experts.w13_weight.data, experts.w2_weight.data, **scales)
    layer = Layer(problem, "alone", backend="staged")
    assert same_bits(y, layer(x, topk_ids, topk_weights * 2.5, weights))
    # Writes in place are seen, and experts of both kinds share a buffer.
    experts.w2_weight_scale.data.mul_(2)
    again = run(experts, call, dist.group.WORLD, activation_clamp=clamp, routed_scaling_factor=2.5)
    assert torch.equal(again.float(), 2 * y.float())
    blocks = run(built(), call, dist.group.WORLD, activation_clamp=clamp)
    assert_close(blocks.float(), dense(call, clamp), relative=FP8)
    assert len(mega_moe._MEGA_MOE_SYMM_BUFFER) == 1


def _by_channel_over_two_ranks(rank):
    made = adapter.install(backend="staged")
    experts, call = by_channel(METHODS["compressed-tensors"](), rank, 2), tokens(20 if rank else 0)
    y = run(experts, call, dist.group.WORLD)
    made.close()
    return y, call


def test_experts_by_channel_over_two_ranks():
    (none, _), (y, call) = launch(_by_channel_over_two_ranks, 2)
    assert none.shape == (0, HIDDEN)
    assert_close(y.float(), dense(call, precision="fp8_channel"), relative=FP8)


def test_only_experts_by_channel_are_made_ready(installed):
    """In blocks, or behind another backend, they stay what SGLang makes of them."""
    given = (
        args_of("block", block_structure=[128, 128]),
        args_of("group", group_size=128, dynamic=True),
    )
    method, experts = schemes.CompressedTensorsW8A8Fp8MoE(*given), flagged(torch.nn.Module())
    experts.moe_tp_size = 1
    method.create_weights(experts, EXPERTS, HIDDEN, INTERMEDIATE, torch.bfloat16)
    with chosen("megamoe"):
        method.process_weights_after_loading(experts)
    assert not experts._mega_moe_weights_built
    assert not by_channel(METHODS["w8a8_fp8"](), backend="none")._mega_moe_weights_built
    assert by_channel(METHODS["w8a8_fp8"]())._mega_moe_weights_built


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"activation": "gelu"}, "moe_runner_config.activation is 'gelu', expected 'silu'"),
        ({"is_gated": False}, "moe_runner_config.is_gated is False"),
        ({"gemm1_alpha": 1.702}, "moe_runner_config.gemm1_alpha is 1.702, expected None"),
        ({"gemm1_beta": 1.0}, "moe_runner_config.gemm1_beta is 1.0, expected None"),
        ({"gemm1_clamp_limit": 7.0}, "moe_runner_config.gemm1_clamp_limit is 7.0"),
        ({"apply_router_weight_on_input": True}, "apply_router_weight_on_input is True"),
    ],
)
def test_experts_of_another_formula_are_refused(installed, config, message):
    with pytest.raises(ConfigError, match=message):
        by_channel(METHODS["compressed-tensors"](), **config)
    blocks = flagged(experts_of(), **config)
    with pytest.raises(ConfigError, match=message):
        mega_moe_sm90.build_sm90_mega_moe_experts_weights(blocks)


SIZES = EXPERTS, 64, TOP_K, HIDDEN, INTERMEDIATE


@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        (SIZES, {"mma_type": "mxf4xmxf4"}, "mma_type is 'mxf4xmxf4', expected 'fp8xfp4'"),
        (SIZES, {"mma_type": "bf16xbf16"}, "mma_type is 'bf16xbf16'"),
        (SIZES, {"activation": "situ"}, "activation is 'situ', expected 'swiglu'"),
        (SIZES, {"num_shared_experts": 1}, "num_shared_experts is 1, expected 0"),
        ((6, 64, 3, 250, 128), {}, "hidden is 250, expected a multiple of"),
        ((6, 0, 3, 256, 128), {}, "max_tokens is 0, expected 1.."),
    ],
)
def test_buffers_that_no_layer_has_are_refused(installed, sizes, options, message):
    with pytest.raises(ConfigError) as caught:
        installed.get_symm_buffer_for_mega_moe(None, *sizes, **options)
    assert message in str(caught.value)


def test_calls_that_no_layer_takes_are_refused(installed):
    experts, (x, ids, weights) = built(), tokens()
    deep_gemm = sys.modules["deep_gemm"]
    buffer = deep_gemm.get_symm_buffer_for_mega_moe(None, *SIZES)
    y, pairs = torch.empty_like(x), (experts.mega_l1_weights, experts.mega_l2_weights)
    stage, four = deep_gemm.mega_moe_pre_dispatch_sm90, [buffer] * 4
    with pytest.raises(ArgumentError, match="buffer is empty"):
        deep_gemm.fp8_mega_moe(y, *pairs, buffer)
    with pytest.raises(ArgumentError, match="buffers is .'Tensor', 'Tensor', 'Tensor', 'Tensor'"):
        stage(x, ids, weights, *[x] * 4, num_tokens=20)
    stage(x, ids, weights, *four, num_tokens=21)
    with pytest.raises(ArgumentError, match="num_tokens is 21, expected 0..20"):
        deep_gemm.fp8_mega_moe(y, *pairs, buffer)
    stage(x, ids, weights, *four, num_tokens=20, group_size=32)
    with pytest.raises(ConfigError, match="group_size is 32"):
        deep_gemm.fp8_mega_moe(y, *pairs, buffer)
    stage(x.to(torch.float8_e4m3fn), ids, weights, *four, num_tokens=20)
    with pytest.raises(ArgumentError, match=r"x.dtype is torch.float8_e4m3fn, expected torch.bf"):
        deep_gemm.fp8_mega_moe(y, *pairs, buffer)
    with pytest.raises(ArgumentError, match="buffer is empty"):  # what was refused is not kept
        deep_gemm.fp8_mega_moe(y, *pairs, buffer)
    for options in ({"recipe": (1, 1, 32)}, {"activation": "situ"}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            deep_gemm.fp8_mega_moe(y, *pairs, buffer, **options)
    with pytest.raises(ArgumentError, match="sym_buffer is Tensor"):
        deep_gemm.fp8_mega_moe(y, *pairs, x)


def test_sglangs_own_runner_is_told_the_order_of_rows():
    """It has batches of more tokens than the buffer has room for, and takes gate and up to be in turn."""

    def core_of(experts):
        with chosen("megamoe"):
            return DeepGemmRunnerCore(MoeRunnerConfig(layer=experts))

    early = core_of(built())
    assert early.use_swizzle
    made = adapter.install(backend="staged")
    ours, loaded_later = experts_of(), experts_of()
    core, other = core_of(ours), core_of(loaded_later)
    mega_moe_sm90.build_sm90_mega_moe_experts_weights(ours)
    assert not core.use_swizzle
    assert other.use_swizzle  # not built yet
    assert early.use_swizzle  # built before
    with chosen("none"):
        assert not DeepGemmRunnerCore(MoeRunnerConfig(layer=early)).use_swizzle
    assert not core_of(by_channel(METHODS["w8a8_fp8"]())).use_swizzle
    made.uninstall()
    assert core_of(loaded_later).use_swizzle


def test_weights_built_before_or_otherwise_are_refused(monkeypatch):
    early = built()
    assert not isinstance(early.mega_l1_weights, adapter.Rows)
    with monkeypatch.context() as patch:
        patch.setattr(mega_moe_sm90, "_interleave_l1_weight_only", lambda w: w.flip(1))
        made = adapter.install(backend="staged")
        with pytest.raises(ConfigError, match="SGLang's w13 is in an order that is not known"):
            built()
    with pytest.raises(ArgumentError, match="l1_weights is interleaved by 8 rows"):
        run(early, tokens(), dist.group.WORLD)
    made.uninstall()
    mega_moe._MEGA_MOE_SYMM_BUFFER.clear()


def test_the_plugin_installs_only_where_it_is_named(monkeypatch):
    deep_gemm = sys.modules["deep_gemm"]
    with envs.SGLANG_PLUGINS.override("other"):
        adapter.plugin()
    assert not hasattr(deep_gemm, "fp8_mega_moe")
    with envs.SGLANG_PLUGINS.override("other, megamoe"):
        adapter.plugin()
        adapter.plugin()
    assert hasattr(deep_gemm, "fp8_mega_moe")
    with pytest.raises(ConfigError, match=r"install\(\) is called again"):
        adapter.install()
    adapter._patches.made.uninstall()
    assert not hasattr(deep_gemm, "fp8_mega_moe")
    (found,) = entry_points(group=GENERAL_PLUGINS_GROUP, name="megamoe")  # where the library looks
    assert found.load() is adapter.plugin
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    with pytest.raises(ConfigError, match="sglang is not usable"):
        adapter.install()


def test_wrong_options_are_named():
    for options in ({"backend": "magma"}, {"reserve_sm": 3}):
        with pytest.raises(ConfigError, match="magma|reserve_sm"):
            adapter.install(**options)
    assert adapter._patches.made is None
