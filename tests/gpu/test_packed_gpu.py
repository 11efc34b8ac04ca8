"""GPT-OSS in MXFP4 on a GPU: loaded packed by transformers, texts and gradients beside dequantized experts."""

import gc
import sys
from pathlib import Path

import pytest
import torch

from megamoe.testing import assert_close

transformers = pytest.importorskip("transformers", minversion="5.23")
sys.path.append(str(Path(__file__).resolve().parents[1] / "unit"))
from hf_models import token_ids  # noqa: E402
from hf_quantized import written_packed  # noqa: E402

from megamoe.adapters import transformers as adapter  # noqa: E402

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
SIZES = {"hidden_size": 512, "intermediate_size": 1024}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return written_packed(tmp_path_factory.mktemp("gpt-oss"), **SIZES)


@pytest.fixture(autouse=True)
def experts():
    registered = adapter.register(max_tokens=64)
    yield registered
    registered.close()


def loaded(folder, dequantize=False, implementation="megamoe"):
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.bfloat16,
        device_map=DEVICE,
        experts_implementation=implementation,
        quantization_config=transformers.Mxfp4Config(dequantize=dequantize),
    )


def test_loading_needs_no_more_than_the_files(folder):
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model = loaded(folder)
    assert sum(p.nbytes for p in model.parameters()) <= size
    assert torch.cuda.max_memory_allocated() - before < 1.25 * size  # dense experts have 3.7 of it


@torch.no_grad()
def test_texts_and_a_graph(folder):
    model, dense = loaded(folder), loaded(folder, True, "eager")
    ids = token_ids(2, 12).to(DEVICE)
    assert_close(model(ids).logits, dense(ids).logits, relative=1e-2)
    texts = model.generate(ids, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    assert texts.shape == (2, 20)
    kept = model(ids, use_cache=False).logits
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = model(ids, use_cache=False).logits
    ids.copy_(ids.flip(1))
    graph.replay()
    assert torch.equal(replayed, model(ids, use_cache=False).logits)
    assert not torch.equal(replayed, kept)


def test_gradients_have_the_bits_of_dequantized_experts(folder):
    found = []
    for dequantize in (False, True):
        model = loaded(folder, dequantize).train()
        for name, p in model.named_parameters():
            matrices = "blocks", "scales", "gate_up_proj", "down_proj"
            p.requires_grad_(not name.endswith(matrices))
        ids = token_ids(2, 12).to(DEVICE)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad})
    packed, dense = found
    assert packed.keys() == dense.keys()
    for name, expected in dense.items():
        assert expected.any()
        if "embed_tokens" not in name:  # torch adds rows of one token in any order
            assert_close(packed[name], expected, relative=1e-3, name=name)
    assert sum(torch.equal(packed[n], dense[n]) for n in packed if "experts" in n) == 4
