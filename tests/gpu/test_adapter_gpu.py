"""Models of transformers through the kernel: training, generation, graphs, FP8 and FP4; all layers in one window."""

import sys
from pathlib import Path

import pytest
import torch

from megamoe.testing import assert_close

transformers = pytest.importorskip("transformers", minversion="5.20")
sys.path.append(str(Path(__file__).resolve().parents[1] / "unit"))
from hf_models import ALL_EXPERTS, experts_of, model_of, routes, rows, token_ids  # noqa: E402
from hf_quantized import HIDDEN, PAIRS, ROUNDED_ROWS  # noqa: E402

from megamoe.adapters import transformers as adapter  # noqa: E402

BACKEND, DEVICE = "mega", "cuda"
pytestmark = pytest.mark.gpu


@pytest.fixture
def register():
    made = []

    def registered(**options):
        made.append(adapter.register(backend=BACKEND, max_tokens=64, **options))
        return made[-1]

    yield registered
    for experts in made:
        experts.close()


@pytest.mark.filterwarnings("ignore:.*_checkpointing_:FutureWarning")
@pytest.mark.parametrize("name", ALL_EXPERTS)
def test_models_train_and_generate(register, name):
    experts = register()
    sizes = ALL_EXPERTS[name] | {"num_hidden_layers": 3}
    model, eager = (model_of(name, i, **sizes).to(DEVICE) for i in ("megamoe", "eager"))
    ids = token_ids(2, 12).to(DEVICE)
    found, expected = (m(ids, labels=ids) for m in (model, eager))
    assert_close(found.logits, expected.logits, relative=0.03)
    found.loss.backward()
    expected.loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters()}
    for key, parameter in eager.named_parameters():
        if parameter.grad is not None and parameter.grad.norm() > 1e-3:
            assert_close(gradients[key], parameter.grad, relative=0.06, name=key)
    model.zero_grad()
    model.gradient_checkpointing_enable()
    model(ids, labels=ids, use_cache=False).loss.backward()
    for key, parameter in model.named_parameters():
        if "experts" in key:
            assert_close(parameter.grad, gradients[key], relative=1e-2, name=key)
    model.gradient_checkpointing_disable()
    texts = model.eval().generate(ids, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    assert texts.shape == (2, 17)
    assert experts.num_layers == len(experts_of(model)) > 1
    windows = {id(borrowed.get("window")) for borrowed in experts._windows}
    assert len(windows) == 1
    assert bool(experts._windows[0]) == (BACKEND == "mega")


def test_graphs_of_a_compiled_model(register):
    register()
    model = model_of("Qwen3Moe", "megamoe", **ALL_EXPERTS["Qwen3Moe"]).to(DEVICE).eval()
    ids = token_ids(2, 12).to(DEVICE)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
        for _ in range(3):
            found = compiled(ids, use_cache=False).logits.clone()
            assert_close(found, expected, relative=0.02)  # the rest of the model is fused


@pytest.mark.parametrize("kind", PAIRS)
@torch.no_grad()
def test_quantized_experts(register, kind):
    register()
    module, own = (experts_of(model.to(DEVICE))[-1] for model in PAIRS[kind]())
    topk_weights, ids = (t.to(DEVICE) for t in routes(40, 4))
    x = rows(40, HIDDEN).to(DEVICE)
    y = module(x, ids, topk_weights)
    assert_close(y, own(x, ids, topk_weights), relative=ROUNDED_ROWS)
