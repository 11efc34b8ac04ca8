"""Tiny models of transformers, with its own experts and with a megamoe layer over the same parameters."""

import copy
import re
from types import SimpleNamespace

import pytest
import torch

from megamoe.backends import select
from megamoe.core.config import ACTIVATIONS, Activation
from megamoe.core.errors import ConfigError, MegaMoEError
from megamoe.testing import assert_close, compare

transformers = pytest.importorskip("transformers", minversion="5.20")
from hf_models import (  # noqa: E402
    ALL_EXPERTS,
    MODELS,
    SMALL,
    eager_copy,
    experts_of,
    model_of,
    routes,
    rows,
    snippets,
    token_ids,
)

from megamoe.adapters import transformers as adapter  # noqa: E402
from megamoe.adapters.transformers_weights import activation_of, weights_of  # noqa: E402

OTHER_ACTIVATIONS = {
    "GptOss": ACTIVATIONS["swiglu_oai"],
    "MiniMaxM3VLText": ACTIVATIONS["swiglu_oai"],
    "NemotronH": ACTIVATIONS["relu2"],
    "Gemma4Text": ACTIVATIONS["geglu_tanh"],
    "DeepseekV4": Activation("clamped_swiglu", limit=10.0),
}
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("NemotronH", "Gemma4Text")]


@pytest.fixture
def emulated():
    registered = adapter.register("megamoe_emulated", backend="emulate", max_tokens=16)
    yield registered
    registered.close()


def results(module, x, topk_weights, ids, dy):
    """Return y and the gradients of x, routing weights and all parameters, by name."""
    leaves = {"x": x.clone().requires_grad_(), "weights": topk_weights.clone().requires_grad_()}
    y = module(leaves["x"], ids, leaves["weights"])
    assert y.dtype == x.dtype
    y.backward(dy)
    found = {name: t.grad for name, t in (leaves | dict(module.named_parameters())).items()}
    return {"y": y.detach()} | found


def compare_experts(name, implementation, tokens):
    module = experts_of(model_of(name, implementation))[-1]
    topk_weights, ids = routes(tokens, module.num_experts)
    given = rows(tokens), topk_weights, ids, rows(tokens, seed=4)
    expected = results(eager_copy(module), *given)
    found = results(module, *given)
    assert len(expected) == (7 if name == "GptOss" else 5)
    for key, value in expected.items():
        assert value.abs().max() > 0
        assert_close(found[key], value, relative=0.02, name=key)
    return module


@pytest.mark.parametrize("name", MODELS)
def test_experts_are_those_of_transformers(experts, name):
    module = compare_experts(name, "megamoe", 40)  # three calls of 16 tokens
    assert module in experts._modules
    assert activation_of(module) == OTHER_ACTIVATIONS.get(name, ACTIVATIONS["swiglu"])


@pytest.mark.parametrize("name", ["Qwen3Moe", "GptOss", *SLOW])
def test_experts_through_the_source_of_the_kernel(emulated, name):
    compare_experts(name, "megamoe_emulated", 9)


def test_a_call_without_tokens(experts):
    module = experts_of(model_of("Qwen3Moe", "megamoe"))[0]
    topk_weights, ids = routes(0, 6)
    assert module(rows(0), ids, topk_weights).shape == (0, 64)


@pytest.mark.parametrize("name", ["Mixtral", "GptOss"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_types_than_bf16(experts, name, dtype):
    module = experts_of(model_of(name, "megamoe"))[0].to(dtype)
    topk_weights, ids = routes(20, module.num_experts)
    given = rows(20).to(dtype), topk_weights.to(dtype), ids, rows(20, seed=4).to(dtype)
    expected = results(eager_copy(module), *given)
    for key, value in results(module, *given).items():
        assert value.dtype == dtype
        assert_close(value, expected[key], relative=0.02, name=key)


@pytest.mark.filterwarnings("ignore:.*_checkpointing_:FutureWarning")
@pytest.mark.parametrize("name", ALL_EXPERTS)
def test_whole_models(experts, name):
    """Logits, all gradients, also by gradient checkpointing, and generated text."""
    model = model_of(name, "megamoe", **ALL_EXPERTS[name])
    eager = model_of(name, "eager", **ALL_EXPERTS[name])
    ids = token_ids(2, 12)
    logits, expected = model(ids, labels=ids), eager(ids, labels=ids)
    assert_close(logits.logits, expected.logits, relative=0.03)
    logits.loss.backward()
    expected.loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    for key, parameter in eager.named_parameters():
        assert (parameter.grad is None) == (key not in gradients), key
        if parameter.grad is not None and parameter.grad.norm() > 1e-3:
            assert_close(gradients[key], parameter.grad, relative=0.06, name=key)
    model.zero_grad()
    model.gradient_checkpointing_enable()
    calls = []
    experts_of(model)[0].register_forward_pre_hook(lambda *_: calls.append(1))
    model(ids, labels=ids, use_cache=False).loss.backward()
    assert len(calls) == 2  # once more in the backward pass
    for key, parameter in model.named_parameters():
        if key in gradients:
            assert_close(parameter.grad, gradients[key], relative=1e-6, name=key)
    model.gradient_checkpointing_disable()
    texts = model.eval().generate(ids, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    assert torch.equal(texts[:, :12], ids)
    with torch.no_grad():
        scores = eager.eval()(texts).logits[:, 11:-1].float()
    chosen = scores.gather(-1, texts[:, 12:, None]).squeeze(-1)
    allowed = chosen + 0.05 * scores.std(-1)  # a near tie may go the other way
    scores[..., 2] = -torch.inf  # the end, which min_new_tokens excludes
    assert (scores.amax(-1) <= allowed).all()


@pytest.mark.parametrize("name", ["Qwen3Moe", "Mixtral", "GptOss", "NemotronH", "AriaText"])
def test_a_model_trains_and_is_saved(experts, name, tmp_path):
    model = model_of(name, "megamoe")
    ids = token_ids(2, 12)
    model(ids, labels=ids).loss.backward()
    for module in experts_of(model):
        for key, parameter in module.named_parameters():
            assert parameter.grad.isfinite().all(), key
            assert parameter.grad.any(), key
    before = [p.detach().clone() for m in experts_of(model) for p in m.parameters()]
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    after = [p for m in experts_of(model) for p in m.parameters()]
    assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    model.eval()
    with torch.no_grad():
        logits = model(ids).logits
        model.save_pretrained(tmp_path)
        load = transformers.AutoModelForCausalLM.from_pretrained
        again = load(tmp_path, dtype=torch.bfloat16, experts_implementation="megamoe").eval()
        assert torch.equal(again(ids).logits, logits)
        own = load(tmp_path, dtype=torch.bfloat16, experts_implementation="eager").eval()
        assert set(own.state_dict()) == set(model.state_dict())
        assert all(torch.equal(t, own.state_dict()[n]) for n, t in model.state_dict().items())


def experts_alone(family, name, **sizes):
    """Return the experts of a family whose models are large even when they are tiny."""
    path = f"transformers.models.{family}.modeling_{family}"
    sizes |= {"hidden_size": 64, "moe_intermediate_size": 48, "hidden_act": "silu"}
    config = SimpleNamespace(**sizes, _experts_implementation="megamoe")
    module = getattr(pytest.importorskip(path), name)(config)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module


REFUSED = {
    "muse_spark MuseSparkExperts": "experts is MuseSparkExperts, expected no norm behind each expert",
    "inkling2 Inkling2Experts": "activation is that of Inkling2Experts, expected one of swiglu, ",
}


@pytest.mark.parametrize("names", REFUSED)
def test_families_that_a_layer_does_not_compute_are_refused(experts, names):
    sizes = {"num_local_experts": 4, "moe_hidden_size": 64, "post_norm_eps": 1e-6}
    caps = {"n_routed_experts": 4, "mlp_gate_softcap": 5.0, "mlp_up_softcap": 5.0}
    module = experts_alone(*names.split(), **sizes, **caps)
    topk_weights, ids = routes(4, 4)
    with pytest.raises(ConfigError, match=REFUSED[names]):
        module(rows(4), ids, topk_weights)
    assert module not in experts._modules


@pytest.mark.parametrize("inner", [48, 32, 64])
@pytest.mark.parametrize("family", ["openai_privacy_filter OpenAIPrivacyFilter", "aria Aria"])
def test_transposed_experts_not_in_turn(experts, family, inner):
    """Flags say how they lie, also where I, or 2I, is H; a wrong flag is refused."""
    folder, name = family.split()
    sizes = {"intermediate_size": inner, "num_local_experts": 4, "moe_num_experts": 4}
    sizes |= {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}
    module = experts_alone(folder, f"{name}Experts", **sizes).bfloat16()
    topk_weights, ids = routes(20, 4)
    given = rows(20), topk_weights, ids, rows(20, seed=4)
    expected = results(eager_copy(module), *given)
    for key, value in results(module, *given).items():
        assert_close(value, expected[key], relative=0.02, name=key)
    module.is_transposed = False
    with pytest.raises(MegaMoEError, match=r"\.shape is \[|intermediate is \d+, expected"):
        module(rows(20), ids, topk_weights)
    module.is_transposed, module.is_concatenated = True, False
    with pytest.raises(ConfigError, match="activation is that of"):
        module(rows(20), ids, topk_weights)


def test_llama4_keeps_its_own_experts(experts):
    """Its scores multiply x, not y, and its experts are called with rows alone: no layer may stand for them."""
    sizes = SMALL | {"intermediate_size_mlp": 48, "num_local_experts": 4, "head_dim": 16}
    config = transformers.Llama4TextConfig(**sizes, interleave_moe_layer_step=1)
    logits = []
    for implementation in ("eager", "megamoe"):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, experts_implementation=implementation
        )
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0, 0.1)
            logits.append(model(token_ids(2, 12)).logits)
    assert torch.equal(*logits)
    assert experts.num_layers == 0
    module = model.model.layers[0].feed_forward.experts
    with pytest.raises(ConfigError, match="experts is Llama4TextExperts without has_gate"):
        weights_of(module)


def test_what_a_layer_does_not_compute_is_refused(experts):
    module = experts_of(model_of("Mixtral", "megamoe"))[0]
    topk_weights, ids = routes(4, 4)
    given = rows(4), ids, topk_weights
    module._is_expert_parallel = True
    with pytest.raises(
        ConfigError, match="MixtralExperts over several ranks, expected all experts"
    ):
        module(*given)
    module._is_expert_parallel = False
    module.act_fn = torch.nn.ReLU()
    with pytest.raises(ConfigError, match="activation is that of MixtralExperts, expected one of"):
        module(*given)
    parameter = module.gate_up_proj
    module.gate_up_proj = torch.nn.Parameter(parameter[0])
    with pytest.raises(ConfigError, match="one tensor of 3 dimensions"):
        module(*given)
    module.gate_up_proj = torch.nn.Parameter(parameter.to(torch.float8_e5m2), requires_grad=False)
    with pytest.raises(ConfigError, match="dtype is torch.float8_e5m2, expected torch.bfloat16,"):
        module(*given)
    module.gate_up_proj = torch.nn.Parameter(parameter.double())
    with pytest.raises(ConfigError, match="dtype is torch.float64, expected torch.bfloat16,"):
        module(*given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0, expected 1.."),
        ({"max_tokens": 16.0}, "max_tokens is 16.0, expected an int"),
        ({"precision": "fp9"}, "precision is 'fp9', expected bf16 or fp8"),
        ({"precision": ""}, "precision is '', expected bf16 or fp8"),
        ({"backend": "magma"}, "backend is 'magma', expected auto, mega"),
        ({"backend": None}, "backend is None, expected auto, mega"),
        ({"reserve_sm": 3}, "option is 'reserve_sm', expected one of"),
        ({"routed_scaling_factor": 2.0}, "option is 'routed_scaling_factor', expected one of"),
        ({"reserve_sms": -1}, "reserve_sms is -1, expected"),
        ({"name": "eager"}, "name is 'eager', expected one that transformers has not taken"),
        ({"name": "grouped_mm"}, "name is 'grouped_mm', expected one that"),
        ({"name": 3}, "name is 3, expected"),
    ],
)
def test_wrong_options_are_named_when_they_are_registered(options, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        adapter.register(**options)


def test_the_program_of_the_document_runs(tmp_path):
    pytest.importorskip("accelerate")
    expected = model_of("Qwen3Moe", "eager", **ALL_EXPERTS["Qwen3Moe"]).eval()
    expected.save_pretrained(tmp_path)
    names = {}
    exec(snippets(tmp_path)[0], names)
    with torch.no_grad():
        logits = names["model"].eval()(token_ids(2, 12)).logits
        assert_close(logits, expected(token_ids(2, 12)).logits, relative=0.03)
    assert names["experts"].num_layers == 2
    names["experts"].close()


def test_experts_are_compiled_whole(experts):
    module = experts_of(model_of("GptOss", "megamoe"))[0]
    topk_weights, ids = routes(9, 6)
    given = rows(9), topk_weights, ids, rows(9, seed=4)
    expected = results(module, *given)
    module.zero_grad()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for key, value in results(compiled, *given).items():
        assert torch.equal(value, expected[key.removeprefix("_orig_mod.")]), key


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Qwen3Moe", "GptOss"])
def test_models_are_compiled_whole(experts, name):
    model, ids = model_of(name, "megamoe"), token_ids(2, 12)
    expected = model(ids).logits
    assert torch.equal(
        torch.compile(model, backend="aot_eager", fullgraph=True)(ids).logits, expected
    )


def test_copies_have_layers_of_their_own(experts, tmp_path):
    module = experts_of(model_of("Qwen3Moe", "megamoe"))[0]
    topk_weights, ids = routes(5, 6)
    y = module(rows(5), ids, topk_weights)
    torch.save(module, tmp_path / "module")
    for other in (copy.deepcopy(module), torch.load(tmp_path / "module", weights_only=False)):
        assert not other._megamoe_layers
        assert torch.equal(other(rows(5), ids, topk_weights), y)
        assert other in experts._modules


@pytest.mark.parametrize("change", [{"limit": 0.5}, {"alpha": 0.1}, {"limit": 2.0, "alpha": 3.0}])
def test_a_changed_activation_is_followed(experts, change):
    model = model_of("GptOss", "megamoe")
    module = experts_of(model)[0]
    with torch.no_grad():
        module.gate_up_proj.mul_(50)
    topk_weights, ids = routes(9, 6)
    before = module(rows(9), ids, topk_weights).detach()
    for name, value in change.items():
        setattr(module, name, value)
    found = module(rows(9), ids, topk_weights).detach()
    model.set_experts_implementation("eager")
    expected = module(rows(9), ids, topk_weights).detach()
    assert compare(found, expected).relative <= 2e-2
    assert compare(before, expected).relative > 5e-2


@pytest.mark.parametrize("name", ["GptOss", "Qwen3Moe"])
def test_a_changed_activation_is_followed_by_a_compiled_module(experts, name):
    module = experts_of(model_of(name, "megamoe"))[0]
    with torch.no_grad():
        module.gate_up_proj.mul_(50 if name == "GptOss" else 1)
    topk_weights, ids = routes(9, 6)
    given = rows(9), ids, topk_weights
    before = module(*given).detach()
    compiled = torch.compile(module, backend="aot_eager")
    assert torch.equal(compiled(*given), before)
    if name == "GptOss":
        module.limit = 0.5
    else:
        module.act_fn = torch.nn.GELU()
    found, expected = (f(*given).detach() for f in (compiled, eager_copy(module)))
    assert_close(found, expected, relative=0.02)
    assert compare(before, expected).relative > 5e-2
    whole = torch.compile(module, backend="aot_eager", fullgraph=True)
    assert torch.equal(whole(*given), found)


def test_closed_layers_open_again(experts):
    own = adapter.register("megamoe_closed", backend="staged")
    module = experts_of(model_of("Qwen3Moe", "megamoe_closed"))[0]
    topk_weights, ids = routes(5, 6)
    y = module(rows(5), ids, topk_weights)
    assert own.num_layers == 1
    own.close()
    assert own.num_layers == 0
    assert torch.equal(module(rows(5), ids, topk_weights), y)
    own.close()


@pytest.mark.stub
@torch.no_grad()
def test_layers_of_one_size_share_a_window(monkeypatch):
    """Where the kernel runs, a window and a workspace for each layer would take hundreds of MB for each."""
    monkeypatch.setattr(select, "why_not_mega", lambda *_: None)
    own = adapter.register(backend="mega", max_tokens=64)
    for num_windows, top_k in ((1, 2), (1, 2), (2, 3)):  # the last model has other sizes
        model = model_of("Qwen3Moe", "megamoe", num_experts_per_tok=top_k)
        model(token_ids(2, 12))
        layers = [layer for m in experts_of(model) for layer in m._megamoe_layers.values()]
        backends = [layer._runtime.backend for layer in layers]
        assert len(backends) == 2
        assert len({id(b.window) for b in backends}) == 1
        assert len({b.window.workspace(b.plan).data_ptr() for b in backends}) == 1
        assert len({id(w["window"]) for w in own._windows}) == num_windows
    own.close()
    assert backends[0].window.closed


def test_experts_that_run_in_their_own_code_are_named(caplog):
    from transformers import Llama4TextConfig
    from transformers.models.llama4.modeling_llama4 import Llama4ForCausalLM

    sizes = {
        "hidden_size": 64,
        "intermediate_size": 48,
        "intermediate_size_mlp": 48,
        "vocab_size": 32,
    }
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    config = Llama4TextConfig(
        **sizes, **heads, num_hidden_layers=1, num_local_experts=4, moe_layers=[0]
    )
    left = "model.layers.0.feed_forward.experts"
    assert adapter.find_experts(Llama4ForCausalLM(config)) == ([], [left])
    assert (
        f"1 modules of experts ignore experts_implementation and run in their own code: {left}"
        in caplog.text
    )
    caplog.clear()
    taken, others = adapter.find_experts(model_of("Qwen3Moe", "eager"))
    assert taken
    assert (others, caplog.text) == ([], "")
