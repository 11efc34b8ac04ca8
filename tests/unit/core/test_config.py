"""Problem, Activation, env and errors: constraints, expert ranges, hashes, messages."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from programs import run_code

import megamoe
from megamoe.core import env
from megamoe.core.config import ACTIVATIONS, Activation, Problem, activation_by_name
from megamoe.core.errors import (
    ArgumentError,
    ConfigError,
    PeerFault,
    ProtocolTimeout,
    RankMismatch,
    fault_to_error,
)
from megamoe.jit import abi
from megamoe.launch.layout import window_regions
from megamoe.testing import backend_of, gpu_of
from megamoe.testing.shapes import SHAPES

GOOD = {"hidden": 256, "intermediate": 128, "num_experts": 8, "top_k": 2}
RECORD = {"edge": "rows_ready", "rank": 3, "peer": 8, "role": "load_a", "index": 17, "expected": 128,
          "seen": 96, "waited_ns": 10_000_000_000}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden", 0),
        ("hidden", 24),
        ("hidden", 16400),
        ("intermediate", -16),
        ("intermediate", 16400),
        ("num_experts", 0),
        ("num_experts", 1025),
        ("top_k", 0),
        ("top_k", 33),
        ("ep_size", 0),
        ("rank", 1),
        ("rank", -1),
        ("max_tokens", 0),
        ("max_tokens", 1 << 31),
        ("precision", "fp4"),
        ("hidden", 256.0),
        ("bias", 1),
    ],
)
def test_constraint_names_argument_and_value(name, value):
    with pytest.raises(ConfigError) as caught:
        Problem(**{**GOOD, name: value})
    assert f"{name} is {value!r}, expected" in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_limits_are_allowed():
    problem = Problem(16384, 16384, 8 * 1024, 32, ep_size=8, rank=7, max_tokens=(1 << 22) - 1)
    assert problem.num_local_experts(7) == 1024


@pytest.mark.parametrize("known", SHAPES.values(), ids=lambda s: s.name)
def test_every_known_model_is_a_problem(known):
    sizes = (known.hidden, known.intermediate, known.num_experts, known.top_k)
    for ranks in (1, 4, 8):
        Problem(*sizes, ep_size=ranks, activation=known.activation, bias=known.bias)


def test_all_violations_are_reported_at_once():
    with pytest.raises(ConfigError, match=r"hidden is 1.*top_k is 99"):
        Problem(**{**GOOD, "hidden": 1, "top_k": 99})


@given(st.integers(1, 300), st.integers(1, 8))
def test_expert_ranges_partition_the_experts(experts, ranks):
    problem = Problem(16, 16, experts, 1, ep_size=ranks)
    sizes = [problem.num_local_experts(r) for r in range(ranks)]
    assert sum(sizes) == experts
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1
    owners = [r for r in range(ranks) for _ in range(sizes[r])]
    assert [problem.rank_of_expert(e) for e in range(experts)] == owners
    assert [problem.expert_begin(r) for r in range(ranks)] == [sum(sizes[:r]) for r in range(ranks)]


def test_fingerprint_is_stable_and_ignores_the_rank():
    base = Problem(**GOOD, ep_size=2)
    assert replace(base, rank=1).fingerprint() == base.fingerprint()
    others = [
        replace(base, hidden=272),
        replace(base, max_tokens=64),
        replace(base, precision="fp8"),
        replace(base, bias=True),
        replace(base, activation="geglu"),
        replace(base, activation="geglu_tanh"),
        replace(base, activation=Activation("clamped_swiglu", limit=7)),
        replace(base, activation=Activation("clamped_swiglu", limit=8)),
        replace(base, activation=Activation("clamped_swiglu", limit=7, alpha=2)),
        replace(base, activation=Activation("clamped_swiglu", limit=7, up_offset=1)),
    ]
    assert len({p.fingerprint() for p in [base, *others]}) == len(others) + 1
    code = f"import megamoe; print(megamoe.Problem(**{GOOD}, ep_size=2).fingerprint())"
    assert int(run_code(code)) == base.fingerprint() < 1 << 32


def test_activations_match_their_definitions():
    gate, up = torch.randn(5, 16) * 6, torch.randn(5, 16) * 6
    both = torch.cat([gate, up], dim=1)
    sigmoid = torch.sigmoid
    g, u = gate.clamp(max=7), up.clamp(-7, 7)
    gelu = 0.5 * gate * (1 + torch.erf(gate / 2**0.5))
    by_tanh = 0.5 * gate * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)))
    expected = {
        "swiglu": gate * sigmoid(gate) * up,
        "swiglu_oai": g * sigmoid(1.702 * g) * (u + 1),
        "geglu": gelu * up,
        "geglu_tanh": by_tanh * up,
    }
    for name, value in expected.items():
        torch.testing.assert_close(ACTIVATIONS[name](both), value)
        assert ACTIVATIONS[name].planes == 2
    torch.testing.assert_close(ACTIVATIONS["relu2"](gate), gate.clamp(min=0) ** 2)
    assert not ACTIVATIONS["relu2"].gated
    assert ACTIVATIONS["swiglu"](both.bfloat16()).dtype == torch.float32


def test_activation_by_name():
    own = Activation("clamped_swiglu", alpha=1, limit=10)
    assert activation_by_name(own) is own
    assert Problem(**GOOD, activation="relu2").activation == ACTIVATIONS["relu2"]
    with pytest.raises(ConfigError, match="'gelu'.*swiglu_oai"):
        activation_by_name("gelu")
    with pytest.raises(ConfigError, match="limit"):
        Activation("swiglu", limit=3.0)


def test_environment(monkeypatch):
    monkeypatch.delenv("MEGAMOE_TIMEOUT_S", raising=False)
    assert env.timeout_s() == 120
    assert env.reserve_sms() is None
    monkeypatch.setenv("MEGAMOE_TIMEOUT_S", "2.5")
    monkeypatch.setenv("MEGAMOE_RESERVE_SMS", "4")
    assert (env.timeout_s(), env.reserve_sms()) == (2.5, 4)
    for value in ("soon", "1e30", "inf", "nan", "0", "-1"):  # the kernel has 64 bits of nanoseconds
        monkeypatch.setenv("MEGAMOE_TIMEOUT_S", value)
        with pytest.raises(ConfigError, match=f"MEGAMOE_TIMEOUT_S is '{value}', expected a number"):
            env.timeout_s()
    for value in (-1, 1e30, float("nan"), "1e99", [1], 10**400):
        with pytest.raises(ConfigError, match="timeout_s is .* expected a number from 0.001 to 1e"):
            megamoe.Layer(Problem(**GOOD), backend="emulate", timeout_s=value)
    monkeypatch.setenv("MEGAMOE_RESERVE_SMS", "inf")
    with pytest.raises(ConfigError, match="MEGAMOE_RESERVE_SMS is 'inf'"):
        env.reserve_sms()
    monkeypatch.setenv("MEGAMOE_TRANSPORT", "rdma")
    with pytest.raises(
        ConfigError, match="MEGAMOE_TRANSPORT is 'rdma', expected one of auto, symm"
    ):
        env.get("MEGAMOE_TRANSPORT")
    assert all(v.meaning and name.startswith("MEGAMOE_") for name, v in env.TABLE.items())


def test_ranks_share_gpus_only_where_they_may(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("MEGAMOE_SHARE_GPUS", raising=False)
    assert [gpu_of(rank).index for rank in range(4)] == [0, 1, 2, 3]
    monkeypatch.setenv("MEGAMOE_SHARE_GPUS", "1")
    assert [gpu_of(rank).index for rank in range(4)] == [0, 1, 0, 1]
    assert backend_of(4, "cpu:gloo,cuda:nccl") == backend_of(4, "gloo") == "gloo"
    assert backend_of(2, "cpu:gloo,cuda:nccl") == "cpu:gloo,cuda:nccl"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert gpu_of(0).index == 0  # whoever uses it hears from torch that there is none
    monkeypatch.setenv("MEGAMOE_SHARE_GPUS", "yes")
    with pytest.raises(ConfigError, match="MEGAMOE_SHARE_GPUS is 'yes', expected one of 0, 1"):
        gpu_of(0)


@pytest.mark.parametrize("edge", [edge.name for edge in abi.Edge if edge.name != "none"])
def test_every_edge_says_who_waited_for_whom(edge):
    message = str(fault_to_error({**RECORD, "edge": edge}))
    assert edge in message or isinstance(fault_to_error({**RECORD, "edge": edge}), RankMismatch)
    assert "(? -> ?)" not in message


def test_local_fault_message():
    error = fault_to_error(RECORD)
    assert isinstance(error, ProtocolTimeout)
    text = "rank 3 waited 10.0 s at edge rows_ready (dispatch -> load_a) for block 17: expected 128, saw 96"
    assert str(error).startswith(text)
    assert "(role load_a)" in str(error)
    barrier = str(fault_to_error({**RECORD, "edge": "grid_barrier", "index": 0}))
    assert "grid_barrier (all CTAs -> all CTAs): expected 128" in barrier


def test_cross_rank_faults_name_the_peer():
    record = {**RECORD, "edge": "partials_ready", "peer": 1, "index": 40, "role": "transport"}
    assert "combine) for token 40 from rank 1" in str(fault_to_error(record))
    assert "Look at rank 1" in str(fault_to_error(record))
    assert isinstance(fault_to_error(record), ProtocolTimeout)
    mismatch = fault_to_error({**record, "edge": "config"})
    assert isinstance(mismatch, RankMismatch)
    assert "rank 1 runs another configuration than rank 3" in str(mismatch)


def test_leaving_with_a_peer_is_a_peer_fault():
    record = {**RECORD, "edge": "peer_abort", "peer": 8, "expected": 0, "seen": 0}
    error = fault_to_error(record)
    assert isinstance(error, PeerFault)
    assert "rank 3 left its launch because another rank gave up" in str(error)


def test_argument_error_carries_its_parts():
    error = ArgumentError("x.dtype", torch.float32, "torch.bfloat16")
    assert str(error) == "x.dtype is torch.float32, expected torch.bfloat16"
    assert (error.argument, error.expected) == ("x.dtype", "torch.bfloat16")
    assert isinstance(error, (megamoe.MegaMoEError, ValueError))


@pytest.mark.parametrize("ranks", range(1, 9))
def test_the_most_tokens_have_an_index(ranks):
    """Tokens are numbered in chunks of 32, the ranks' chunks in turns: the last one's number must fit 25 bits."""
    problem = partial(Problem, 64, 64, 8, 2, ep_size=ranks)
    most = (1 << 25) // (32 * ranks) * 32
    window_regions(problem(max_tokens=most))
    assert (most // 32 * ranks) * 32 <= 1 << 25
    with pytest.raises(ConfigError, match="max_tokens"):
        window_regions(problem(max_tokens=most + 1))
