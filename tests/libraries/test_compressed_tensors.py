"""FP8_DYNAMIC checkpoints that transformers loads: experts come dequantized, fp8_channel finds their codes again."""

import json

import pytest
import torch

pytest.importorskip("compressed_tensors", reason="compressed-tensors is missing: make libraries")
transformers = pytest.importorskip("transformers", minversion="5.20")
from safetensors.torch import load_file, save_file  # noqa: E402

from megamoe import ExpertWeights, Layer, Problem  # noqa: E402
from megamoe.adapters import transformers as adapter  # noqa: E402
from megamoe.core.errors import ArgumentError  # noqa: E402
from megamoe.formats.quantization import quantize_channels  # noqa: E402
from megamoe.testing import assert_close, same_bits  # noqa: E402

HIDDEN, INNER, EXPERTS, TOP_K = 64, 48, 6, 2
FP8 = 0.08  # beside bf16: x and h are quantized
E4M3 = {"num_bits": 8, "type": "float", "symmetric": True}
SCHEME = {
    "targets": ["Linear"],
    "weights": E4M3 | {"strategy": "channel", "dynamic": False},
    "input_activations": E4M3 | {"strategy": "token", "dynamic": True},
}
RECIPE = {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"]}
RECIPE |= {"quantization_status": "compressed", "config_groups": {"group_0": SCHEME}}
IGNORED = [f"model.layers.{n}.mlp.gate" for n in range(2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint as llm-compressor writes it: e4m3 and scales in bf16, by channel, of experts and attention."""
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        hidden_size=HIDDEN, intermediate_size=INNER, moe_intermediate_size=INNER, num_experts=EXPERTS,
        num_experts_per_tok=TOP_K, num_hidden_layers=2, vocab_size=128, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("checkpoint")
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.1)
    model.save_pretrained(folder)
    (file,) = folder.glob("*.safetensors")
    tensors = {}
    for name, w in load_file(file).items():
        if "experts" in name or "_proj.weight" in name:
            scale = (w.float().abs().amax(1, keepdim=True) / 448).bfloat16()
            w = (w.float() / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale"] = scale
        tensors[name] = w
    save_file(tensors, file, metadata={"format": "pt"})
    said = json.loads((folder / "config.json").read_text())
    recipe = RECIPE | {"ignore": ["lm_head", *IGNORED]}
    (folder / "config.json").write_text(json.dumps(said | {"quantization_config": recipe}))
    return folder


def loaded(folder, implementation):
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, experts_implementation=implementation
    )


def stored(folder, layer):
    """Return what the checkpoint has of a layer's experts: codes and scales of w13 and w2."""
    (file,) = folder.glob("*.safetensors")
    tensors, prefix = load_file(file), f"model.layers.{layer}.mlp.experts"

    def of(*parts, end=""):
        names = [
            [f"{prefix}.{n}.{part}_proj.weight{end}" for part in parts] for n in range(EXPERTS)
        ]
        return torch.stack([torch.cat([tensors[n] for n in each]) for each in names])

    return [(of(*parts), of(*parts, end="_scale").float()) for parts in (("gate", "up"), ("down",))]


def test_a_layer_multiplies_the_checkpoints_own_codes(folder):
    experts = adapter.register(backend="staged", precision="fp8_channel", max_tokens=32)
    model, plain = loaded(folder, "megamoe"), loaded(folder, "eager")
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(20, HIDDEN, generator=generator).bfloat16()
    weights, ids = torch.rand(20, EXPERTS, generator=generator).topk(TOP_K)
    problem = Problem(HIDDEN, INNER, EXPERTS, TOP_K, max_tokens=32, precision="fp8_channel")
    layer = Layer(problem, "alone", backend="staged")
    pairs = zip(model.model.layers, plain.model.layers, strict=True)
    for number, (ours, theirs) in enumerate(pairs):
        module, found = ours.mlp.experts, []
        own = stored(folder, number)
        for matrix, (codes, scale) in zip(
            (module.gate_up_proj, module.down_proj), own, strict=True
        ):
            assert (
                matrix.dtype == torch.bfloat16
            )  # a release that keeps e4m3 is to be read in place
            q, made = quantize_channels(matrix)
            assert torch.equal(q.view(torch.uint8), codes.view(torch.uint8))
            assert_close(made, scale, relative=2**-8)  # the largest number was rounded to bf16
            found.append(made)
        with torch.no_grad():
            y = module(x, ids, weights)
            call, (w13, w2) = (x, ids, weights), (codes for codes, _ in own)
            of_codes = layer(*call, ExpertWeights(w13, w2, w13_scale=found[0], w2_scale=found[1]))
            assert same_bits(y, of_codes)
            assert_close(y, theirs.mlp.experts(*call), relative=FP8)
            # A fault that this sees: the scales of other rows
            found[0].copy_(found[0].roll(1, 1))
            other = layer(*call, ExpertWeights(w13, w2, w13_scale=found[0], w2_scale=found[1]))
            assert not same_bits(y, other)
    layer.close()
    with pytest.raises(ArgumentError, match="precision 'fp8_channel' has no backward pass"):
        module(x, ids, weights)
    experts.close()


@torch.no_grad()
def test_a_whole_model(folder):
    experts = adapter.register(backend="staged", precision="fp8_channel", max_tokens=32)
    ids = torch.randint(3, 128, (2, 12), generator=torch.Generator().manual_seed(1))
    model, plain = loaded(folder, "megamoe"), loaded(folder, "eager")
    assert_close(model(ids).logits, plain(ids).logits, relative=0.05)
    assert (
        experts.num_layers == 2
    )  # of a model that is held: a dropped one's layers are not counted
    experts.close()
