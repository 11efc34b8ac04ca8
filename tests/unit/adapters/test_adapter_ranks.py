"""Two ranks of transformers' expert parallelism: a megamoe layer beside transformers' own exchange of tokens."""

import gc

import pytest
import torch
from copies import watched

from megamoe.core.errors import MegaMoEError
from megamoe.testing import assert_close, launch

transformers = pytest.importorskip("transformers", minversion="5.23")
pytest.importorskip("accelerate")
from hf_models import ALL_EXPERTS, experts_of, model_of, snippets, token_ids  # noqa: E402
from outcomes import outcome  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from transformers.distributed import DistributedConfig  # noqa: E402

from megamoe.adapters import transformers as adapter  # noqa: E402

NAMES = ("Qwen3Moe", "GptOss")
# Every rank brings its own tokens, or a slice of those that all have.
SIZES = {"own": {"fsdp_size": 2}, "shared": {"tp_size": 2}}


def load(folder, implementation, sizes, **options):
    config = DistributedConfig(**sizes, ep_size=2, ep_implementation=implementation)
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, distributed_config=config, **options
    )


def by_the_document(folder):
    """Return the model that the second program of docs/adapters.md loads."""
    names = {"AutoModelForCausalLM": transformers.AutoModelForCausalLM, "torch": torch}
    exec(snippets(folder)[1], names)
    return names["model"]


def step(model, ids):
    """Return this rank's logits and its part of all gradients."""
    out = model(ids, labels=ids, use_cache=False)
    out.loss.backward()
    found = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        found[name] = grad.to_local().clone() if isinstance(grad, DTensor) else grad
    model.zero_grad()
    return {"logits": out.logits.detach()} | found


def error_of(function, *arguments):
    try:
        function(*arguments)
    except MegaMoEError as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def run(rank, folder, name):
    own = adapter.register(backend="staged", max_tokens=64)
    result = {}
    for tokens, sizes in SIZES.items():
        ids = token_ids(1 if tokens == "shared" else 1 + rank, 7)  # 7 do not divide by 2
        mine, theirs = (load(folder, i, sizes) for i in ("megamoe", "all_to_all"))
        found, expected = step(mine, ids), step(theirs, ids)
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            if value.numel() and value.norm() > 1e-3:
                assert_close(found[key], value, relative=0.03, name=f"{key} {tokens}")
        result[tokens] = len(expected)
        result["experts"] = experts_of(mine)[0].gate_up_proj.to_local().shape[0]
    texts = mine.eval().generate(ids, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    result |= {"texts": texts.tolist(), "layers": own.num_layers}
    mine = by_the_document(folder)
    with torch.no_grad():
        result["too many"] = error_of(mine, token_ids(1 + 9 * rank, 7))
        theirs = load(folder, "all_to_all", SIZES["own"], experts_implementation="megamoe")
        result["not ours"] = error_of(theirs, ids)
    gc.disable()
    del mine, theirs
    if rank == 1:
        gc.collect()  # so that the ranks have different modules left
    result["left"] = own.num_layers
    own.close()
    return result


def run_and_refuse(rank, folder, plain):
    """Ranks import transformers for seconds: once for both tests."""
    found = run(rank, folder, NAMES[0])
    gc.enable()
    return found, refuse(rank, plain)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder, plain = (tmp_path_factory.mktemp(name) for name in ("model", "plain"))
    model_of(NAMES[0], "eager", **ALL_EXPERTS[NAMES[0]]).save_pretrained(folder)
    model_of(NAMES[0], "eager").save_pretrained(plain)
    return list(zip(*launch(run_and_refuse, 2, str(folder), str(plain)), strict=True))


@pytest.mark.parametrize("name", [NAMES[0], pytest.param(NAMES[1], marks=pytest.mark.slow)])
def test_models_over_two_ranks(results, name, tmp_path):
    model, of_ranks = model_of(name, "eager", **ALL_EXPERTS[name]), results[0]
    if name != NAMES[0]:
        model.save_pretrained(tmp_path)
        of_ranks = launch(run, 2, str(tmp_path), name)
    for found in of_ranks:
        assert found["own"] == found["shared"] == 1 + len(list(model.parameters()))
        assert found["experts"] == 3
        assert found["layers"] >= 2  # of the last model; the first may be gone
        assert found["texts"] == of_ranks[0]["texts"]
        assert len(found["texts"][0]) == 10
        refused = "over several ranks, expected all experts on one rank, or ep_implementation"
        assert refused in found["not ours"]
        assert "x.shape[0] is 70, expected at most max_tokens = 64" in found["too many"]
    assert of_ranks[0]["left"] > of_ranks[1]["left"] == 0
    assert "rank 1 raised ArgumentError" in of_ranks[0]["too many"]


def train_sharded(rank, name, reshard):
    """Train over FSDP2, whose gathering no counter of torch shows, then write to its shards, in two ways."""
    own = adapter.register("megamoe_sharded", backend="staged", precision="fp8", max_tokens=64)
    model, ids = model_of(name, "megamoe_sharded"), token_ids(2, 12)
    for part in (*model.model.layers, model):
        fully_shard(part, reshard_after_forward=reshard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    with watched() as seen:
        for _ in range(2):
            for _ in range(2):
                model(ids, labels=ids).loss.backward()
            optimizer.step()
        with torch.no_grad():
            model(ids)
            model.load_state_dict({n: 0.5 * t for n, t in model.state_dict().items()})
            model(ids)
            for t in model.state_dict().values():
                t.to_local().mul_(0.5)
            model(ids)
    own.close()
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_sharded_experts_are_quantized_once_a_step(name, reshard):
    layers, due = 2, 2 * (1 + 2 + 2)
    expected = [{"stale": 0, "q": layers * due}] * 2
    assert launch(train_sharded, 2, name, reshard) == expected


def refuse(rank, folder):
    """Rank 1 alone has experts that this adapter refuses by itself: before their layer is made, and behind that."""
    own = adapter.register(backend="staged", max_tokens=64)
    model, ids = load(folder, "megamoe", SIZES["own"]), token_ids(1, 7)
    module, found = experts_of(model)[0], []
    with torch.no_grad():
        for _ in range(2):
            module.has_post_expert_norm = bool(rank)
            found.append(outcome(lambda: model(ids)))
            module.has_post_expert_norm = False
            found.append(outcome(lambda: model(ids)))
        own.close()
        act, module.act_fn = module.act_fn, torch.nn.Tanh() if rank else module.act_fn
        found.append(outcome(lambda: model(ids)))
        module.act_fn = act
        found.append(outcome(lambda: model(ids)))
    own.close()
    return found


def test_what_one_rank_refuses_raises_on_all(results):
    there, here = results[1]
    assert there[1::2] == here[1::2] == [(None, "")] * 3  # a later call is as good as ever
    assert [kind for kind, _ in there[::2]] == ["PeerFault"] * 3, there
    for (_, error), text in zip(
        here[::2], ("no norm",) * 2 + ("activation is that of",), strict=True
    ):
        assert text in error
