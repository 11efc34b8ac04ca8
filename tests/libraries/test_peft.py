"""LoRA on experts by PEFT: a layer's own parameters, and transformers' in both layouts, beside eager experts."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("peft", reason="peft is missing: make libraries")
transformers = pytest.importorskip("transformers", minversion="5.20")
sys.path.append(str(Path(__file__).resolve().parents[1] / "unit"))
from hf_models import experts_of  # noqa: E402
from hf_quantized import written_packed  # noqa: E402
from pages import programs  # noqa: E402
from peft import LoraConfig, PeftModel, get_peft_model  # noqa: E402
from transformers import (  # noqa: E402
    GptOssConfig,
    GptOssForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import megamoe  # noqa: E402
import megamoe.adapters.peft  # noqa: E402
from megamoe.adapters import transformers as adapter  # noqa: E402
from megamoe.core.errors import ConfigError  # noqa: E402
from megamoe.testing import assert_close, compare  # noqa: E402

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts_per_tok": 2,
}
MODELS = {
    "[E, 2I, H]": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SHAPE, num_experts=4, moe_intermediate_size=32)
    ),
    "[E, H, 2I]": lambda: GptOssForCausalLM(
        GptOssConfig(**SHAPE, num_local_experts=4, intermediate_size=64)
    ),
}


def adapted(model, *targets):
    config = LoraConfig(
        r=4, target_parameters=list(targets), target_modules=[], init_lora_weights=False
    )
    return get_peft_model(model, config)


@pytest.mark.parametrize("layout", MODELS)
def test_adapters_of_transformers_experts_get_the_gradients_of_eager_ones(layout):
    adapter.register(max_tokens=64, backend="staged")
    found = {}
    for experts in ("eager", "megamoe"):
        torch.manual_seed(0)
        model = MODELS[layout]().bfloat16()
        model.set_experts_implementation(experts)
        model = adapted(model, "mlp.experts.gate_up_proj", "mlp.experts.down_proj")
        ids = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(1))
        model(input_ids=ids, labels=ids).loss.backward()
        found[experts] = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    assert len(found["eager"]) == 4
    for name, expected in found["eager"].items():
        assert expected.any()
        assert_close(found["megamoe"][name], expected, relative=3e-2, name=name)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.moe = megamoe.MegaMoE(64, 32, 4, 2, max_tokens=64, backend="staged", init_seed=3)

    def forward(self, x, ids, weights):
        return self.moe(x, ids, weights)


def test_adapters_of_a_layer():
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    weights, ids = torch.rand(16, 4, generator=torch.Generator().manual_seed(1)).topk(2)
    base = Net()
    unchanged = base(x, ids, weights)
    model = adapted(base, "moe.w13", "moe.w2")
    y = model(x, ids, weights)
    assert not torch.equal(y, unchanged)
    y.float().square().mean().backward()
    grads = [p.grad for p in model.parameters() if p.requires_grad]
    assert len(grads) == 4
    assert all(grad.any() for grad in grads)
    merged = model.merge_and_unload()
    assert type(merged.moe) is megamoe.MegaMoE
    assert_close(merged(x, ids, weights), y, relative=2e-2, name="merged")


def test_attention_and_router_over_packed_experts(tmp_path):
    """GPT-OSS in MXFP4: every gradient has the bits of the same experts dequantized; experts stay as they are."""
    folder = written_packed(tmp_path)
    adapter.register(max_tokens=64, backend="staged")
    found = {}
    for experts in ("packed", "dequantized"):
        config = transformers.Mxfp4Config(dequantize=experts != "packed")
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.bfloat16,
            experts_implementation="megamoe",
            quantization_config=config,
        )
        torch.manual_seed(0)
        lora = LoraConfig(
            r=4,
            target_modules="all-linear",
            target_parameters=["mlp.router.weight"],
            modules_to_save=["norm"],
            init_lora_weights=False,
        )
        model = get_peft_model(model, lora)
        before = [p.clone() for n, p in model.named_parameters() if "experts" in n]
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        optimizer = torch.optim.AdamW(trained.values(), lr=1e-2)
        ids = torch.randint(3, 128, (2, 16), generator=torch.Generator().manual_seed(1))
        losses = []
        for step in range(6):
            loss = model.train()(input_ids=ids, labels=ids).loss
            loss.backward()
            if step == 0:
                found[experts] = {n: p.grad.clone() for n, p in trained.items()}
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        assert losses[-1] < losses[0]
        after = [p for n, p in model.named_parameters() if "experts" in n]
        assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
        assert type(experts_of(model)[0]).__name__ == (
            "PackedExperts" if experts == "packed" else "GptOssExperts"
        )
    assert sum("self_attn" in n for n in found["packed"]) == 16
    assert sum("router" in n for n in found["packed"]) == 4
    for name, expected in found["dequantized"].items():
        assert expected.any()
        assert torch.equal(found["packed"][name], expected), name


EXPERTS = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"


def loaded(folder, kind):
    """kind: experts stay packed, or float experts that transformers computes with PEFT's own wrapper."""
    packed = kind == "packed"
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.bfloat16,
        experts_implementation="megamoe" if packed else "eager",
        quantization_config=transformers.Mxfp4Config(dequantize=not packed),
    )


def with_lora(folder, kind, *targets, **options):
    torch.manual_seed(0)
    options = {"r": 8, "lora_alpha": 64, "init_lora_weights": False} | options
    config = LoraConfig(target_parameters=list(targets), target_modules=[], **options)
    return get_peft_model(loaded(folder, kind), config)


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory):
    adapter.register(max_tokens=64, backend="staged")
    megamoe.adapters.peft.install()
    return written_packed(tmp_path_factory.mktemp("gpt-oss"))


def batch():
    return torch.randint(3, 128, (2, 16), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("targets", [EXPERTS, EXPERTS[:1], EXPERTS[1:]])
@pytest.mark.parametrize("rank", [4, 8])
def test_lora_on_packed_experts_has_the_gradients_of_float_ones(gpt_oss, targets, rank):
    found, ids = {}, batch()
    for kind in ("packed", "float"):
        model = with_lora(gpt_oss, kind, *targets, r=rank).train()
        model(input_ids=ids, labels=ids).loss.backward()
        found[kind] = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    assert [*found["packed"]] == [*found["float"]]
    assert sum("experts" in name for name in found["packed"]) == 4 * len(targets)
    for name, expected in found["float"].items():
        assert expected.any()
        assert_close(found["packed"][name], expected, relative=3e-2, name=name)


@torch.no_grad()
@pytest.mark.parametrize(("first", "second"), [("packed", "float"), ("float", "packed")])
def test_adapters_are_read_by_the_other_kind(gpt_oss, tmp_path, first, second):
    ids, model = batch(), with_lora(gpt_oss, first, *EXPERTS)
    expected, state = model(ids).logits, model.state_dict()
    with model.disable_adapter():
        plain = model(ids).logits
    model.save_pretrained(tmp_path)
    other = PeftModel.from_pretrained(loaded(gpt_oss, second), tmp_path)
    own = other.state_dict()
    factors = [name for name in own if ".lora_" in name]
    assert len(factors) == 8
    assert all(torch.equal(own[name], state[name]) for name in factors)
    assert_close(other(ids).logits, expected, relative=2e-2)
    with other.disable_adapter():
        assert_close(other(ids).logits, plain, relative=1e-2)
    assert compare(expected, plain).relative > 0.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_steps_over_packed_experts(gpt_oss, dtype):
    model, ids = with_lora(gpt_oss, "packed", *EXPERTS, init_lora_weights=True).train(), batch()
    model.to(dtype)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    base = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(6):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0] - 0.1
    after = dict(model.named_parameters())
    assert all(torch.equal(after[name], value) for name, value in base.items())
    assert sorted(experts_of(model)[0].state_dict())[:2] == ["down_proj_bias", "down_proj_blocks"]


def test_the_program_of_the_page(gpt_oss):
    (program,) = programs("docs/adapters.md", "peft")
    names = {"model": loaded(gpt_oss, "packed")}
    exec(program, names)
    trained = [n for n, p in names["model"].named_parameters() if p.requires_grad]
    assert len(trained) == 8
    assert all("experts" in name for name in trained)


def test_a_second_adapter_and_what_is_refused(gpt_oss):
    model, ids = with_lora(gpt_oss, "packed", *EXPERTS), batch()
    config = LoraConfig(
        r=4,
        lora_alpha=32,
        target_parameters=[*EXPERTS],
        target_modules=[],
        init_lora_weights=False,
    )
    first = model(ids).logits
    model.add_adapter("second", config)
    assert torch.equal(model(ids).logits, first)
    model.base_model.set_adapter(["default", "second"])
    assert compare(model(ids).logits, first).relative > 0.1
    with pytest.raises(ConfigError, match="weights to merge into is packed"):
        model.merge_and_unload()
    assert not experts_of(model)[0].adapters
