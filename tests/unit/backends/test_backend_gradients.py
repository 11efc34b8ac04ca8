"""Gradients of reference, staged (one and two gloo ranks) and the emulated kernel at every edge, against the oracle."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from ambient import default_dtype
from calls import calls_of
from test_reference_backward import EDGES, NAMES, make_call

from megamoe.backends import reference
from megamoe.backends.call import Call, GradRequest, Needs
from megamoe.backends.emulate.emulation import Emulation
from megamoe.backends.reference import ReferenceBackend
from megamoe.backends.reference.quant import quantize_experts
from megamoe.backends.staged import StagedBackend
from megamoe.core.config import ACTIVATIONS, Problem
from megamoe.core.errors import ArgumentError, PeerFault
from megamoe.formats.weights import ExpertWeights
from megamoe.group.group import Group
from megamoe.layer.autograd import apply
from megamoe.layer.inputs import Inputs
from megamoe.layer.runtime import Runtime
from megamoe.testing import assert_close, launch, make_inputs, make_weights

EDGES_BY_NAME = {edge.__name__: edge for edge in EDGES}
TOKENS = {1: (6,), 2: (6, 3)}


def behind_the_count(call):
    """num_tokens_device says 4 and 1; what lies behind is garbage."""
    for t, count in zip((*call.x, *call.dy), (4, 1)[: len(call.x)] * 2, strict=True):
        t[count:] = float("nan")


def edges(ranks):
    found = {**EDGES_BY_NAME, "behind_the_count": behind_the_count}
    return [name for name in found if ranks == 2 or name != "empty_rank"]


def make(name, ranks):
    """Return the call "edge-activation-precision" as the backends take it, and the counts of tokens or None."""
    edge, activation, precision = name.split("-")
    call = make_call(activation, precision == "bf16", TOKENS[ranks])
    {**EDGES_BY_NAME, "behind_the_count": behind_the_count}[edge](call)
    weights = [
        ExpertWeights(
            w.w13.bfloat16(), w.w2.bfloat16(), *(b.float() for b in (w.b13, w.b2) if b is not None)
        )
        for w in call.weights
    ]
    x, dy = ([t.bfloat16() for t in ts] for ts in (call.x, call.dy))
    problem = replace(call.problem, precision=precision)
    scores = [t.float() for t in call.scores]
    call = replace(call, problem=problem, x=x, dy=dy, scores=scores, weights=weights)
    counts = None
    if edge == "behind_the_count":
        counts = [torch.tensor([count], dtype=torch.int32) for count in (4, 1)[:ranks]]
    return call, counts


def names(ranks):
    activations = ACTIVATIONS if ranks == 2 else ("swiglu_oai", "relu2")
    cases = [f"{edge}-{activation}-bf16" for edge in edges(ranks) for activation in activations]
    return cases + [f"{edge}-swiglu_oai-fp8" for edge in edges(ranks)]


def by_reference(call, rank, group, count):
    problem, weights = replace(call.problem, rank=rank), call.weights[rank]
    backend = ReferenceBackend(problem, group)
    routes = call.ids[rank], call.scores[rank]
    forward_weights = weights.quantized(problem)
    call_of_rank = Call(call.x[rank], *routes, forward_weights, count)
    y, state = backend.forward(call_of_rank, keep=True)
    assert torch.equal(y, backend.forward(call_of_rank)[0])
    assert tuple(state.shape) == (backend.state_bytes,)
    wanted = GradRequest(Needs(b13=problem.bias, b2=problem.bias))
    given = Call(call.x[rank], *routes, weights)
    return list(backend.backward(given, call.dy[rank], state, wanted))


def by_staged(call, rank, group, count):
    problem = replace(call.problem, rank=rank)
    leaves = [call.x[rank], call.scores[rank], *call.weights[rank].named().values()]
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    runtime = Runtime(problem, Group.of(group), StagedBackend(problem, group))
    inputs = leaves[0], call.ids[rank], leaves[1], ExpertWeights(*leaves[2:]), count
    y = apply(Inputs.of(*inputs), runtime.handle)
    y.backward(call.dy[rank])
    return [leaf.grad for leaf in leaves]


def run_all(rank, ranks, group=None):
    found = {}
    for name in names(ranks):
        call, counts = make(name, ranks)
        arguments = (
            call,
            rank,
            group or (dist.group.WORLD if ranks > 1 else None),
            counts and counts[rank],
        )
        found[name] = {"reference": by_reference(*arguments), "staged": by_staged(*arguments)}
    return found


def check(name, ranks, results):
    call, counts = make(name, ranks)
    if counts is not None:
        call.ids = [t.clone() for t in call.ids]
        for ids, count in zip(call.ids, counts, strict=True):
            ids[int(count) :] = -1
    problem = call.problem
    stored = [w.quantized(replace(problem, rank=r)) for r, w in enumerate(call.weights)]
    arguments = call.dy, call.x, call.ids, call.scores, stored
    expected = reference.backward(problem, *arguments, rounding="none")
    for rank, result in enumerate(results):
        for way, gradients in result[name].items():
            for of, gradient in zip(NAMES, gradients, strict=False):
                if gradient is None:
                    assert expected[of][rank] is None
                    continue
                # FP8: reference quantizes dy and dgu, 2.6e-2 each; staged h. Of few elements up to 6.1e-2.
                tolerance = 0.08 if problem.precision == "fp8" else 0.01
                what = f"{name}, rank {rank}, {way}: {of}"
                assert_close(gradient, expected[of][rank], relative=tolerance, name=what)


def test_one_rank():
    results = [run_all(0, 1)]
    for name in names(1):
        check(name, 1, results)


@pytest.fixture(scope="module")
def two_ranks():
    return launch(run_all, 2, 2, timeout_s=100)


@pytest.mark.parametrize("edge", edges(2))
def test_two_ranks(two_ranks, edge):
    for name in names(2):
        if name.startswith(f"{edge}-"):
            check(name, 2, two_ranks)


@pytest.fixture(scope="module")
def emulations():
    return {}


@pytest.mark.parametrize("edge", edges(2))
@pytest.mark.parametrize("activation", ["swiglu_oai", "relu2"])
def test_emulated_kernel(emulations, activation, edge):
    name = f"{edge}-{activation}-bf16"
    call, counts = make(name, 2)
    emulation = emulations.setdefault(activation, Emulation(call.problem))
    calls = calls_of(call.x, call.ids, call.scores, call.weights, counts)
    _, states = emulation.train_all(calls)
    results = emulation.backward_all(calls, call.dy, states)
    check(name, 2, [{name: {"emulate": gradients}} for gradients in results])


@pytest.mark.parametrize("activation", ["swiglu", "swiglu_oai", "relu2"])
def test_what_is_not_finite_stays_with_its_token_and_experts(emulations, activation):
    """dy or x of token 3 of rank 0: nothing of the others' dx, of other experts' dw, moves a bit."""
    call, _ = make(f"repeated-{activation}-bf16", 2)
    emulation = emulations.setdefault(activation, Emulation(call.problem))
    routed = set(call.ids[0][3].tolist())

    def gradients(dy, x):
        calls = calls_of(x, call.ids, call.scores, call.weights)
        _, states = emulation.train_all(calls)
        return emulation.backward_all(calls, dy, states)

    clean = gradients(call.dy, call.x)
    for dirty in ("dy", "x"):
        given = {"dy": call.dy, "x": call.x}
        given[dirty] = [t.clone() for t in given[dirty]]
        given[dirty][0][3, 5] = float("nan")
        found = gradients(**given)
        assert found[0][0][3].isnan().all()
        for rank, of_rank in enumerate(found):
            for which, (got, before) in enumerate(zip(of_rank, clean[rank], strict=True)):
                if which < 2:
                    others = [t for t in range(got.shape[0]) if (rank, t) != (0, 3)]
                else:
                    begin = call.problem.expert_begin(rank)
                    others = [e for e in range(got.shape[0]) if e + begin not in routed]
                    hit = [e - begin for e in routed if 0 <= e - begin < got.shape[0]]
                    if (dirty, NAMES[which]) != ("x", "db2"):  # which is made of dy alone
                        assert all(got[e].isnan().any() for e in hit)
                assert torch.equal(got[others], before[others])


def test_a_token_does_not_depend_on_the_others():
    """Every third token of rank 0 comes again among others, which move its rows: equal bits of y, dx, d_scores."""
    problem = Problem(144, 80, 6, 3, ep_size=2, max_tokens=130, bias=True)
    emulation, weights = Emulation(problem), [make_weights(problem, rank=r) for r in range(2)]

    def run(tokens, seed, routing, into=None):
        inputs = [
            make_inputs(problem, t, rank=r, seed=seed, routing=routing)
            for r, t in enumerate(tokens)
        ]
        dy = [make_inputs(problem, t, rank=r, seed=seed + 9).x for r, t in enumerate(tokens)]
        columns = [dy] + [[getattr(i, n) for i in inputs] for n in vars(inputs[0])]
        if into is not None:
            for mine, others in zip(into, columns, strict=True):
                others[0][:70:3] = mine[0][:70:3]
        dy, x, *routes = columns
        calls = calls_of(x, *routes, weights)
        ys, states = emulation.train_all(calls)
        dx, d_scores, *_ = emulation.backward_all(calls, dy, states)[0]
        return columns, [t[:70:3] for t in (ys[0], dx, d_scores)]

    columns, alone = run((70, 33), 1, "uniform")
    _, crowded = run((130, 90), 2, "hot", columns)
    _, others = run((130, 90), 2, "hot")
    for a, b, c in zip(alone, crowded, others, strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)


@pytest.mark.parametrize("of", range(len(NAMES)))
@pytest.mark.parametrize("way", ["reference", "staged"])
def test_a_wrong_gradient_is_seen(two_ranks, way, of):
    """Of rank 1, with one row of it doubled."""
    name = "repeated-swiglu_oai-bf16"
    gradients = list(two_ranks[1][name][way])
    gradients[of] = gradients[of].clone()
    gradients[of][0] *= 2
    wrong = {name: {**two_ranks[1][name], way: gradients}}
    with pytest.raises(AssertionError, match=f"rank 1, {way}: {NAMES[of]}"):
        check(name, 2, [two_ranks[0], wrong])


PROBLEM = Problem(48, 32, 5, 3, max_tokens=16, activation="swiglu_oai", bias=True)


def a_call(problem=PROBLEM, tokens=9):
    """Return a backend, what its backward takes before the state, call and dy, and the state."""
    backend = ReferenceBackend(problem)
    inputs, weights = make_inputs(problem, tokens), make_weights(problem, quantize=False)
    given = inputs.x, inputs.topk_ids, inputs.topk_weights
    _, state = backend.forward(Call(*given, weights.quantized(problem)), keep=True)
    return backend, (Call(*given, weights), inputs.x), state


def test_gradients_are_added_where_asked_and_laid_out_as_the_masters():
    backend, call, state = a_call()
    plain = backend.backward(*call, state, GradRequest())
    assert all(g.dtype == torch.bfloat16 for g in (plain[0], plain[2], plain[3]))
    needs = Needs(False, True, False, True, False, True)
    some = backend.backward(*call, state, GradRequest(needs))
    assert [g is None for g in some] == [True, False] * 3
    main = {"w13": torch.ones(5, 64, 48), "b2": torch.ones(5, 48)}
    added = backend.backward(*call, state, GradRequest(into=main))
    assert added[2] is added[5] is None
    assert torch.equal(added[4], plain[4])
    torch.testing.assert_close(main["w13"].sub(1).bfloat16(), plain[2], rtol=1e-2, atol=1e-5)
    torch.testing.assert_close(main["b2"].sub(1), plain[5], rtol=1e-4, atol=1e-5)
    assert added[3].dtype == torch.bfloat16

    # gate and up rows interleaved, as GPT-OSS stores them
    given, dy = call
    weights = given.weights
    mixed = torch.empty(5, 32, 2, 48, dtype=torch.bfloat16).transpose(1, 2)
    mixed.copy_(weights.w13.unflatten(1, (2, 32)))
    given = given._replace(weights=replace(weights, w13=mixed))
    strided = backend.backward(given, dy, state, GradRequest())
    assert strided[2].stride() == mixed.stride()
    assert torch.equal(strided[2].flatten(1, 2), plain[2])


def test_a_foreign_state_is_named():
    backend, call, state = a_call()
    other, _, others_state = a_call()
    wrong = {
        "one that no forward completed": torch.zeros_like(state),
        rf"that of layer {other.number}, expected one that a forward of .* \({backend.number}\)": others_state,
        r"torch.uint8 \[5\], expected uint8 \[\d+\]": state[:5],
        "torch.float32": state.float(),
    }
    for message, given in wrong.items():
        with pytest.raises(ArgumentError, match=f"state is {message}"):
            backend.backward(*call, given, GradRequest())
    right, dy = call
    x, ids, scores, weights, *_ = right
    with pytest.raises(ArgumentError, match="state is that of other topk_ids"):
        backend.backward(right._replace(topk_ids=ids.flip(0)), dy, state, GradRequest())
    with pytest.raises(ArgumentError, match="state is that of 9 tokens, expected one of 8"):
        backend.backward(Call(x[:8], ids[:8], scores[:8], weights), dy[:8], state, GradRequest())
    moved = torch.cat([state.new_zeros(1), state])[1:]  # offloaded and back: anywhere
    assert backend.backward(*call, moved, GradRequest())[0].any()


def refuse_on_rank_0(rank):
    call, _ = make("dropped-swiglu-bf16", 2)
    problem, weights = replace(call.problem, rank=rank), call.weights[rank]
    backend = ReferenceBackend(problem, dist.group.WORLD)
    routes = call.ids[rank], call.scores[rank]
    given = Call(call.x[rank], *routes, weights)
    _, state = backend.forward(given, keep=True)
    arguments = given, call.dy[rank]
    of_rank = torch.zeros_like(state) if rank == 0 else state
    try:
        with backend.group.together("a first call", lambda: backend):
            backend.backward(*arguments, of_rank, GradRequest())
        first = None
    except (ArgumentError, PeerFault) as error:
        first = f"{type(error).__name__}: {error}"
    wanted = GradRequest(Needs(b13=False, b2=False))
    return first, backend.backward(*arguments, state, wanted)[0]


def test_a_foreign_state_on_one_rank_ends_the_call_on_all():
    (first, dx), (second, _) = launch(refuse_on_rank_0, 2, timeout_s=60)
    assert first.startswith("ArgumentError: state is one that no forward completed")
    assert second == f"PeerFault: rank 0 raised {first}"
    assert dx.any()


def test_quantization_of_the_oracle_has_the_bits_of_the_layers():
    for activation in ("swiglu", "relu2"):
        problem = Problem(144, 208, 3, 2, precision="fp8", activation=activation)
        masters = make_weights(problem, quantize=False)
        masters.w2[1] = 0
        found, expected = quantize_experts(problem, masters), masters.quantized(problem)
        for name, tensor in expected.named().items():
            assert torch.equal(found.named()[name].view(torch.uint8), tensor.view(torch.uint8))


def test_defaults_of_torch_are_not_followed():
    def gradients():
        backend, call, state = a_call(replace(PROBLEM, precision="fp8"))
        return backend.backward(*call, state, GradRequest())

    expected = gradients()
    with default_dtype(torch.float64):
        found = gradients()
        with torch.device("meta"):
            backend, call, state = a_call()
    assert state.device == call[1].device
    assert backend.backward(*call, state, GradRequest())[2].any()
    for got, wanted in zip(found, expected, strict=True):
        assert got.dtype == wanted.dtype
        assert torch.equal(got, wanted)
