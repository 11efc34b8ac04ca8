"""FlashInfer's own expert-parallel layer, built through its registry, with a megamoe layer behind it."""

import dataclasses
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from outcomes import outcome
from pages import programs

from megamoe import ExpertWeights, Layer, Problem
from megamoe.core.errors import ArgumentError, ConfigError, MegaMoEError
from megamoe.formats.quantization import dequantize_rows, quantize_rows
from megamoe.testing import assert_close, launch, make_inputs, make_weights, same_bits

pytest.importorskip("flashinfer", reason="flashinfer is missing: make libraries")
from flashinfer.moe_ep import (  # noqa: E402
    BootstrapConfig,
    FleetParams,
    MegaConfig,
    MoEEpLayer,
    MoEEpTensors,
    MoEWeightPack,
)
from flashinfer.moe_ep.core.kernel.registry import is_mega_kernel_config  # noqa: E402
from flashinfer.moe_ep.core.validation.common import MoEEpConfigError  # noqa: E402

from megamoe.adapters import flashinfer as adapter  # noqa: E402

PROBLEM = Problem(hidden=128, intermediate=128, num_experts=6, top_k=2, max_tokens=32)
TOKENS = 12
# Beside fp64 of the same numbers: roundings of h, y and partials; FP8 quantizes x and h as well; FP4 is exact there.
LIMITS = {"bf16": 6e-3, "fp8": 8e-2, "fp8xmxfp4": 8e-2, "bf16xmxfp4": 6e-3, "bf16xnvfp4": 6e-3}


pytestmark = pytest.mark.usefixtures("one_rank")


def made(pack, problem=PROBLEM, changes=None, **options):
    """Return FlashInfer's layer over a pack, or over transformed weights."""
    fleet = FleetParams(problem.num_experts, problem.max_tokens, problem.hidden)
    stated = {"precision": problem.precision, "backend": "staged"} | options
    kernel = adapter.MegaMoEConfig(problem.intermediate, problem.top_k, **stated)
    config = MegaConfig(megakernel=kernel, **changes or {})
    bootstrap = BootstrapConfig(world_size=problem.ep_size, rank=problem.rank)
    return MoEEpLayer(bootstrap, fleet, pack, backend=config)


def pack_of(problem, quantized=False):
    """Return the experts of make_weights in bf16, or as the precision stores them; and these in fp64."""
    masters = make_weights(problem, quantize=False)
    weights = masters.quantized(problem)
    dense = weights.dense(problem, torch.float64)
    if not quantized:
        return MoEWeightPack(masters.w13, masters.w2), dense
    return MoEWeightPack(weights.w13, weights.w2, weights.w13_scale, weights.w2_scale), dense


def reference(problem, inputs, dense):
    """y of all experts, one by one: products in fp64, activations in fp32."""
    y, x = torch.zeros(inputs.x.shape, dtype=torch.float64), inputs.x.double()
    for e in range(problem.num_experts):
        h = problem.activation(x @ dense.w13[e].flatten(0, -2).double().T).double()
        of_e = inputs.topk_weights.double().where(inputs.topk_ids == e, 0).sum(1, keepdim=True)
        y += of_e * (h @ dense.w2[e].double().T)
    return y


def tensors(inputs, **more):
    return MoEEpTensors(inputs.x, inputs.topk_ids, inputs.topk_weights, **more)


def test_the_registry_knows_it():
    assert is_mega_kernel_config(adapter.MegaMoEConfig(128, 2))
    assert adapter.MegaMoEKernel.kernel_name() == "megamoe"


@pytest.mark.parametrize("backend", ["staged", "emulate"])
@pytest.mark.parametrize("precision", LIMITS)
def test_tokens_of_canonical_weights(precision, backend):
    """A bf16 pack, gate rows first, quantized where the precision is."""
    problem = dataclasses.replace(PROBLEM, precision=precision)
    pack, dense = pack_of(problem)
    layer = made(pack, problem, backend=backend)
    for seed, tokens in ((0, TOKENS), (1, 1), (2, 0), (3, 32)):
        inputs = make_inputs(problem, tokens, seed=seed, ids_dtype=torch.int32)
        layer._forward_signatures.clear()
        y = layer(tensors(inputs))
        assert (y.dtype, y.shape) == (torch.bfloat16, inputs.x.shape)
        if tokens:
            assert_close(y, reference(problem, inputs, dense), relative=LIMITS[precision])
    kept = layer._transformed
    if precision == "bf16":
        assert (kept.w13.data_ptr(), kept.w2.data_ptr()) == (
            pack.w13.data_ptr(),
            pack.w2.data_ptr(),
        )
    else:
        assert kept.w13.element_size() == 1
    layer.destroy()


def test_packs_with_scales_are_read_in_place():
    problem = dataclasses.replace(PROBLEM, precision="fp8")
    pack, dense = pack_of(problem, quantized=True)
    layer, inputs = made(pack, problem), make_inputs(problem, TOKENS)
    y = layer(tensors(inputs))
    assert_close(y, reference(problem, inputs, dense), relative=LIMITS["fp8"])
    assert layer._transformed.w13.data_ptr() == pack.w13.data_ptr()
    canonical = made(pack_of(problem)[0], problem)
    assert same_bits(canonical(tensors(inputs)), y)
    given = ExpertWeights(pack.w13, pack.w2, w13_scale=pack.w13_scale, w2_scale=pack.w2_scale)
    changes = {"preprocess_weights": False, "transformed_weights": given}
    ready = made(pack, problem, changes)
    assert same_bits(ready(tensors(inputs)), y)
    own = Layer(problem, backend="staged")(inputs.x, inputs.topk_ids, inputs.topk_weights, given)
    assert same_bits(own, y)
    for made_here in (layer, canonical, ready):
        made_here.destroy()


def test_packed_fp4_with_its_scales():
    problem = dataclasses.replace(PROBLEM, precision="bf16xmxfp4")
    num, hidden, width = problem.num_experts, problem.hidden, problem.intermediate
    torch.manual_seed(0)
    w13, w2 = (
        torch.randint(0, 256, (num, rows, columns // 2), dtype=torch.uint8)
        for rows, columns in ((2 * width, hidden), (hidden, width))
    )
    s13, s2 = (
        torch.randint(118, 124, (*w.shape[:2], w.shape[2] // 16), dtype=torch.uint8)
        for w in (w13, w2)
    )
    layer, inputs = made(MoEWeightPack(w13, w2, s13, s2), problem), make_inputs(problem, TOKENS)
    given = ExpertWeights.from_mxfp4(w13, w2, s13, s2)
    y = layer(tensors(inputs))
    assert_close(y, reference(problem, inputs, given.dense(problem, torch.float64)), relative=6e-3)
    layer.destroy()


def test_rows_that_are_quantized_already():
    problem = dataclasses.replace(PROBLEM, precision="fp8")
    pack, dense = pack_of(problem)
    layer, inputs = made(pack, problem, {"quantize_input": False}), make_inputs(problem, TOKENS)
    q, scale = quantize_rows(inputs.x)
    y = layer(MoEEpTensors(q, inputs.topk_ids, inputs.topk_weights, scales=scale))
    inputs = dataclasses.replace(inputs, x=dequantize_rows(q, scale))
    assert_close(y, reference(problem, inputs, dense), relative=LIMITS["fp8"])
    layer.destroy()


def test_outputs_and_capacities():
    pack, dense = pack_of(PROBLEM)
    layer, inputs = made(pack), make_inputs(PROBLEM, TOKENS)
    expected = layer(tensors(inputs))
    output = torch.full((TOKENS + 3, 128), 7.0).bfloat16()
    y = layer(tensors(inputs, output=output))
    assert y.data_ptr() == output.data_ptr()
    assert same_bits(y, expected)
    assert (output[TOKENS:] == 7).all()
    small = layer.create_workspace(16)
    assert same_bits(layer(tensors(inputs), workspace=small), expected)
    with pytest.raises(MoEEpConfigError, match="17 tokens exceed max_tokens_per_rank=16"):
        layer(tensors(make_inputs(PROBLEM, 17)), workspace=small)
    small.destroy()
    layer.stage_inputs(tensors(inputs))
    assert same_bits(layer.compute_staged(output=None), expected)
    with pytest.raises(ArgumentError, match=r"compute\(\) is called, expected stage_inputs"):
        layer.compute_staged(output=None)
    with torch.no_grad():
        pack.w2.mul_(2)  # read in place
    assert_close(layer(tensors(inputs)), 2 * expected.float(), relative=1e-6)
    layer.destroy()
    assert layer._workspace is None


def on_two_ranks(rank):
    problem = dataclasses.replace(PROBLEM, ep_size=2, rank=rank)
    whole = make_weights(PROBLEM, quantize=False)
    mine = slice(3 * rank, 3 * rank + 3)
    layer = made(MoEWeightPack(whole.w13[mine], whole.w2[mine]), problem)
    inputs = make_inputs(problem, (TOKENS, 5)[rank])
    y = layer(tensors(inputs))
    assert_close(y, reference(PROBLEM, inputs, whole), relative=LIMITS["bf16"])
    assert layer._workspace.layer.problem.ep_size == 2
    with pytest.raises(MegaMoEError) as caught:
        layer(tensors(inputs, fc2_alpha=torch.ones(6) if rank else None))
    assert same_bits(layer(tensors(inputs)), y)
    layer.destroy()
    return len(y), str(caught.value)


def test_two_ranks():
    (there, told), (here, error) = launch(on_two_ranks, 2)
    assert (there, here) == (TOKENS, 5)
    assert "rank 1 raised " in told
    assert "fc2_alpha is given, expected None" in error


def refused_by_one(rank):
    """Rank 1 alone has tensors that this adapter refuses by itself: before its layer is made, and behind that."""
    problem = dataclasses.replace(PROBLEM, ep_size=2, rank=rank)
    whole, mine = make_weights(PROBLEM, quantize=False), slice(3 * rank, 3 * rank + 3)
    layer = made(MoEWeightPack(whole.w13[mine], whole.w2[mine]), problem)
    right, found = make_inputs(problem, TOKENS), []
    wide = dataclasses.replace(right, topk_ids=right.topk_ids.repeat(1, 2))
    apart = dataclasses.replace(right, topk_weights=right.topk_weights[:, :1])
    for wrong in (wide, apart):
        layer._forward_signatures.clear()  # as before a first call
        found.append(outcome(lambda i=wrong if rank else right: layer(tensors(i))))
        found.append(outcome(lambda: layer(tensors(right))))
    layer.stage_inputs(tensors(right))
    layer.compute_staged(output=None)
    if not rank:
        layer.stage_inputs(tensors(right))
    found.append(outcome(lambda: layer.compute_staged(output=None)))
    found.append(outcome(lambda: layer(tensors(right))))
    layer.destroy()
    layer._kernel._transformed_weights = None if rank else layer._kernel._transformed_weights
    found.append(
        outcome(lambda: layer._kernel.prepare_workspace(layer._bootstrap, layer._fleet_params))
    )
    return found


def test_what_one_rank_refuses_raises_on_all():
    there, here = launch(refused_by_one, 2, timeout_s=60)
    assert there[1::2] == here[1::2] == [(None, "")] * 3  # a later call is as good as ever
    assert [kind for kind, _ in there[::2]] == ["PeerFault"] * 4, there
    expected = (
        "topk_ids.shape[1] (4) does not match",
        "topk_weights and topk_ids must have the same shape",
        "compute() is called, expected stage_inputs()",
        "weights is None, expected a pack",
    )
    for (_, error), text in zip(here[::2], expected, strict=True):
        assert text in error


def refused(match, kind, *args, **options):
    with pytest.raises(kind, match=match):
        made(*args, **options)


def test_what_is_refused_is_named():
    pack, _ = pack_of(PROBLEM)
    fp8 = dataclasses.replace(PROBLEM, precision="fp8")
    scaled, _ = pack_of(fp8, quantized=True)
    refused("precision is 'fp9'", ConfigError, pack, precision="fp9")
    refused("activation is 'gelu'", ConfigError, pack, activation="gelu")
    refused("backend is 'magma'", ConfigError, pack, backend="magma")
    refused("option is 'reserve_sm'", ConfigError, pack, options={"reserve_sm": 3})
    refused("chunks is 1000, expected None or a number from 1 to max_tokens = 32", ConfigError, pack,
            options={"chunks": 1000})  # fmt: skip
    refused("'e4m3' or 'bf16' with precision 'fp8'", ConfigError, pack, fp8,
            options={"weight_gradients": "fp32"})  # fmt: skip
    refused("weights.w13_scale is given, expected None", ArgumentError, scaled)
    for dtype in (torch.float8_e4m3fn, torch.uint8):  # whose scales were forgotten
        for problem in (PROBLEM, fp8):
            bare = MoEWeightPack(pack.w13.to(dtype), pack.w2)
            refused(
                f"weights.w13.dtype is {dtype}, expected torch.bfloat16",
                ArgumentError,
                bare,
                problem,
            )
            bare = MoEWeightPack(pack.w13, pack.w2.to(dtype))
            refused(
                f"weights.w2.dtype is {dtype}, expected torch.bfloat16",
                ArgumentError,
                bare,
                problem,
            )
    wrong = dataclasses.replace(PROBLEM, intermediate=64)
    refused(r"weights.w13.shape is \[6, 256, 128\]", ArgumentError, pack, wrong)
    refused(r"weights.w13.shape is \[6, 256, 128\]", ArgumentError, pack,
            dataclasses.replace(wrong, precision="fp8"))  # fmt: skip
    other = {"preprocess_weights": False, "transformed_weights": object()}
    refused("transformed_weights is object", ArgumentError, pack, PROBLEM, other)
    with pytest.raises(ConfigError, match="megakernel is str, expected MegaMoEConfig"):
        adapter.MegaMoEKernel("megamoe")
    kernel = adapter.MegaMoEKernel(adapter.MegaMoEConfig(128, 2))
    fleet = FleetParams(6, 32, 128)
    with pytest.raises(ConfigError, match="num_experts is 6, expected a multiple of 4"):
        kernel.validate_init(BootstrapConfig(4, 0), fleet)
    with pytest.raises(ConfigError, match="bootstrap.stream is 5"):
        kernel.validate_init(BootstrapConfig(1, 0, stream=5), fleet)
    layer = made(pack)
    inputs = make_inputs(PROBLEM, TOKENS)
    with pytest.raises(MoEEpConfigError, match="does not match kernel top_k"):
        layer(MoEEpTensors(inputs.x, inputs.topk_ids[:, :1], inputs.topk_weights[:, :1]))
    for name in ("fc1_alpha", "fc2_alpha", "fc1_norm_const"):
        with pytest.raises(ArgumentError, match=f"{name} is given, expected None: weights have"):
            layer(tensors(inputs, **{name: torch.full((6,), 2.0)}))
    layer.destroy()


def test_the_snippet_of_the_document():
    (program,) = programs("docs/adapters.md", "flashinfer")
    smaller = {"7168": "128", "2048": "128", "256": "6", "8192": "32", '"cuda"': '"cpu"', "topk(8)": "topk(2)",
               "top_k=8": 'top_k=2, backend="staged"'}  # fmt: skip
    for large, small in smaller.items():
        assert large in program
        program = program.replace(large, small)
    names = {}
    with (
        mock.patch.object(dist, "init_process_group") as started,  # one_rank() did
        mock.patch("torch.cuda.set_device"),
        mock.patch.dict("os.environ", LOCAL_RANK="0"),
    ):
        exec(program, names)
    started.assert_called_once()
    inputs = dataclasses.replace(
        make_inputs(PROBLEM, 32), **{n: names[n] for n in ("x", "topk_ids", "topk_weights")}
    )
    fp8 = dataclasses.replace(PROBLEM, precision="fp8")
    weights = ExpertWeights(names["w13"], names["w2"])
    expected = reference(PROBLEM, inputs, weights.quantized(fp8).dense(fp8, torch.float64))
    assert_close(names["y"], expected, relative=LIMITS["fp8"])
