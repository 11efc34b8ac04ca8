"""GPT-OSS in MXFP4 from a checkpoint as published: loaded packed, compared with transformers' dequantized experts."""

import copy
import json

import pytest
import torch

from megamoe.core.errors import ConfigError
from megamoe.testing import assert_close, compare, launch

transformers = pytest.importorskip("transformers", minversion="5.23")
from hf_models import experts_of, rows, token_ids  # noqa: E402
from hf_quantized import written_packed  # noqa: E402
from safetensors import safe_open  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from transformers.distributed import DistributedConfig  # noqa: E402

from megamoe.adapters import transformers as adapter  # noqa: E402
from megamoe.adapters.library_parameters import local  # noqa: E402
from megamoe.adapters.transformers_packed import PackedExperts  # noqa: E402
from megamoe.adapters.transformers_weights import activation_of, weights_of  # noqa: E402

NAMES = [
    f"{matrix}_proj_{kind}"
    for matrix in ("gate_up", "down")
    for kind in ("bias", "blocks", "scales")
]

pytestmark = pytest.mark.usefixtures("experts")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = written_packed(tmp_path_factory.mktemp("gpt-oss"))
    assert len(list(path.glob("*.safetensors"))) > 3
    return path


def loaded(folder, implementation="megamoe", **options):
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, experts_implementation=implementation, **options
    )


def dequantized(folder):
    config = transformers.Mxfp4Config(dequantize=True)
    return loaded(folder, "eager", quantization_config=config)


def tensors(folder):
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def test_experts_stay_packed(folder):
    model, stored = loaded(folder), tensors(folder)
    assert {type(m) for m in experts_of(model)} == {PackedExperts}
    assert model.is_quantized
    assert model.hf_quantizer.is_trainable
    state = model.state_dict()
    assert state.keys() == stored.keys()
    assert all(torch.equal(state[name], stored[name]) for name in stored)
    first = experts_of(model)[0]
    assert sorted(first.state_dict()) == sorted(NAMES)
    assert first.activation == activation_of(first)
    weights = weights_of(first)
    assert weights.w13.data_ptr() == first.gate_up_proj_blocks.data_ptr()
    assert weights.w2.data_ptr() == first.down_proj_blocks.data_ptr()
    taken, left = adapter.find_experts(model)
    assert len(taken) == 2
    assert not left


@torch.no_grad()
def test_whole_models_and_texts_are_those_of_dequantized_experts(folder):
    model, dense, ids = loaded(folder), dequantized(folder), token_ids(2, 12)
    expected = dense(ids).logits
    assert_close(model(ids).logits, expected, relative=1e-2)  # both round every layer to bf16
    made = [
        m.generate(ids, max_new_tokens=8, min_new_tokens=8, do_sample=False) for m in (model, dense)
    ]
    assert made[0].shape == (2, 20)
    with torch.inference_mode():
        again = dense(made[0]).logits[:, 11:-1]  # teacher-forced: a near tie may go either way
    chosen = again.gather(-1, made[0][:, 12:, None])[..., 0]
    assert (again.amax(-1) - chosen).max() <= 2e-2 * again.abs().max()


@pytest.mark.parametrize("precision", ["bf16xmxfp4", "fp8xmxfp4"])
@torch.no_grad()
def test_one_module(folder, precision):
    other = adapter.register("other", backend="staged", precision=precision)
    module = experts_of(loaded(folder, "other"))[1]
    dense = experts_of(dequantized(folder))[1]
    weights, ids = torch.rand(40, 6).bfloat16().topk(3)
    y, expected = module(rows(40), ids, weights), dense(rows(40), ids, weights)
    assert_close(y, expected, relative=1e-2 if precision == "bf16xmxfp4" else 0.05)
    module.gate_up_proj_bias.add_(1)  # a fault that this test sees, and a copy is made anew
    assert compare(module(rows(40), ids, weights), expected).relative > 0.1
    other.close()


def test_saved_as_it_was_read(folder, tmp_path):
    loaded(folder).save_pretrained(tmp_path)
    before, after = tensors(folder), tensors(tmp_path)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    found = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert found["quant_method"] == "mxfp4"


def gradients(model):
    """Return the gradients of everything but the experts' matrices."""
    for key, p in model.train().named_parameters():
        p.requires_grad_(not key.endswith(("blocks", "scales", "gate_up_proj", "down_proj")))
    ids = token_ids(2, 12)
    model(input_ids=ids, labels=ids).loss.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.requires_grad}


def test_a_step_of_training(folder):
    found, dense = gradients(loaded(folder)), dequantized(folder)
    expected = gradients(dense)
    dense.zero_grad()
    dense.set_experts_implementation("megamoe")
    same = gradients(dense)  # the same numbers, multiplied by the same backend
    assert found.keys() == expected.keys()
    assert sum("router" in n for n in found) == 4
    assert sum("experts" in n for n in found) == 4
    for key, value in expected.items():
        assert value.any()
        assert_close(found[key], value, relative=1.5e-2, name=key)
        assert torch.equal(found[key], same[key]), key


@pytest.mark.parametrize("backend", ["reference", "emulate"])
def test_a_step_of_the_kernels_source_and_of_the_oracle(tmp_path, backend):
    """emulate runs the kernel's own source: gradients have the bits of dequantized experts."""
    sizes = {"intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 4}
    folder, found = written_packed(tmp_path, **sizes), []
    own = adapter.register("own", backend=backend, max_tokens=24)
    for dequantize in (False, True):
        config = transformers.Mxfp4Config(dequantize=dequantize)
        found.append(gradients(loaded(folder, "own", quantization_config=config)))
    assert all(torch.equal(value, found[0][name]) for name, value in found[1].items())
    assert loaded(folder, "own").generate(token_ids(2, 4), max_new_tokens=2).shape == (2, 6)
    own.close()


def over_ranks(rank, folder):
    """Experts over two ranks: loaded packed, each rank's half, and the gradients of one rank."""
    adapter.register(backend="staged", max_tokens=64)
    alone = gradients(loaded(folder))
    for sizes in ({"tp_size": 2}, {"fsdp_size": 2}):
        config = DistributedConfig(**sizes, ep_size=2, ep_implementation="megamoe")
        model = loaded(folder, None, distributed_config=config)
        assert all(isinstance(m, PackedExperts) for m in experts_of(model))
        blocks = local(experts_of(model)[0].gate_up_proj_blocks)
        assert blocks.shape == (3, 192, 2, 16)
        assert blocks.dtype == torch.uint8
        found = gradients(model)
        for key, value in alone.items():
            got = found[key]
            got = got.full_tensor() if isinstance(got, DTensor) else got
            if "experts" in key and got.shape != value.shape:
                value = value.chunk(2)[rank]
            assert_close(got, value, relative=2e-2, name=f"{key} {sizes}")


def test_over_two_ranks(folder):
    launch(over_ranks, 2, folder)


def test_other_implementations_are_transformers_own(folder):
    model = loaded(folder, "eager")  # dequantized: no kernels for CPUs are installed
    assert not any(isinstance(m, PackedExperts) for m in model.modules())
    model = loaded(folder, quantization_config=transformers.Mxfp4Config(dequantize=True))
    assert not any(isinstance(m, PackedExperts) for m in model.modules())
    model = loaded(folder)
    model.set_experts_implementation("eager")
    message = "experts_implementation is 'eager', expected megamoe's, for packed experts"
    with pytest.raises(ConfigError, match=message):
        model(token_ids(1, 4))


def test_widths_that_blocks_do_not_divide_are_refused(folder):
    config = copy.deepcopy(loaded(folder).config)
    config.intermediate_size = 48
    with pytest.raises(ConfigError, match="columns of down_proj is 48, expected a multiple of 32"):
        PackedExperts(config)
