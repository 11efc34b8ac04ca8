"""tools/soak.py `late`, `mismatch`, `kill`: what a right layer does passes, each way to fail is a verdict by name.

The scenarios and their judges are the tool's; the layer is `staged` on one rank that fails as it is told.
"""

import argparse
import json
import signal
import subprocess
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from bench.ranks import Rank
from bench.soak import faults
from bench.soak import layer as layers
from bench.soak.run import report
from megamoe import Problem
from megamoe.backends.staged import StagedBackend
from megamoe.core.errors import ProtocolTimeout, RankMismatch, WindowBroken

SMALL = Problem(64, 48, 6, 2, max_tokens=80)
LATE = "2.0 s at edge routes_ready, waiting for rank 0"
ORDER = "rank 0 runs another configuration"


class Window:
    """Breaks at the first call behind a gather without a value, where the scenarios make a rank fail."""

    def __init__(self, plan):
        self.plan, self.armed, self.broken, self.was_reset = plan, False, False, False

    def call(self):
        if self.broken and not self.plan.get("takes calls when broken"):
            raise WindowBroken("reset it")
        if self.armed:
            self.armed, self.broken = False, True
            kind, text = self.plan["error"]
            if kind is not None:
                raise kind(text)

    def check(self):
        pass

    def close(self):
        pass

    def reset(self):
        self.broken, self.was_reset = False, True


@pytest.fixture
def stage(monkeypatch):
    """Return (scenario, plan) -> its Outcome."""
    windows = []

    class Backend(StagedBackend):
        def __init__(self, problem, group, device=None, window=None, **options):
            super().__init__(problem, None)
            self.window = windows[-1]
            configured = problem != self.window.plan.get("as the others", SMALL)
            if self.window.plan["title"] == "mismatch" and configured and window is None:
                name = "activation" if problem.activation != SMALL.activation else "intermediate"
                if (text := self.window.plan["refuses"]) is not None:
                    raise RankMismatch(text.format(name=name))

        def forward(self, call, keep=False):
            self.window.call()
            y, state = super().forward(call, keep)
            spoiled = self.window.plan.get("spoils") if self.window.was_reset else None
            return y if spoiled is None else spoiled(y), state

        def reset(self):
            self.window.reset()

    def gathered(me, value):
        windows[-1].armed |= value is None
        return [value]

    def problem_of(me, precision="bf16", **changes):
        return replace(SMALL, **changes)

    monkeypatch.setattr(Rank, "gather", gathered)
    for module in (faults, layers):
        monkeypatch.setattr(module, "MegaBackend", Backend)
        monkeypatch.setattr(module, "problem_of", problem_of)
    monkeypatch.setattr(faults, "Window", lambda *a, **k: windows[-1])
    monkeypatch.setattr(faults.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def run(name, **plan):
        windows.append(Window({"title": name, **plan}))
        me = Rank(0, 1, torch.device("cpu"))
        return getattr(faults, name)(me, argparse.Namespace())

    return run


def one_bit(y):
    y = y.clone()
    y.view(torch.int16).flatten()[7] ^= 1
    return y


GOOD = {
    "late": {"error": (ProtocolTimeout, LATE)},
    "mismatch": {"error": (RankMismatch, ORDER), "refuses": "{name} is other on rank 0"},
}
FAULTS = [
    ("late", {"error": (None, "")}, "late, rank 0: NoneType"),
    ("late", {"error": (RankMismatch, LATE)}, "expected ['ProtocolTimeout']"),
    ("late", {"error": (ProtocolTimeout, "for rank 0")}, "no rank's message holds"),
    ("late", {"error": (ProtocolTimeout, "routes_ready")}, "no rank's message holds"),
    ("late", {"takes calls when broken": True}, "a broken window took a call"),
    ("late", {"spoils": one_bit}, "3 calls gave other bits than the first"),
    ("mismatch", {"refuses": None}, "other intermediate, rank 0: NoneType"),
    ("mismatch", {"refuses": "something is other on rank 0"}, "no rank's message holds"),
    ("mismatch", {"refuses": "{name} is other"}, "no rank's message holds"),
    ("mismatch", {"error": (None, "")}, "other order of layers, rank 0: NoneType"),
    ("mismatch", {"error": (ProtocolTimeout, ORDER)}, "expected ['RankMismatch']"),
    ("mismatch", {"error": (RankMismatch, "rank 1 does")}, "no rank's message holds"),
    ("mismatch", {"spoils": one_bit}, "1 calls gave other bits than the first"),
]


@pytest.mark.parametrize("name", GOOD)
def test_a_layer_that_fails_as_it_should_passes(stage, name):
    out = stage(name, **GOOD[name])
    assert out.failures == []
    assert "0 differ" in out.text
    assert len(out.notes) == {"late": 1, "mismatch": 3}[name]


@pytest.mark.parametrize(("name", "plan", "found"), FAULTS)
def test_each_way_to_fail_is_a_verdict(stage, name, plan, found):
    out = stage(name, **GOOD[name] | plan)
    assert any(found in text for text in out.failures), out.failures
    assert report(name, 1, [out]) == 1


def test_results_beyond_the_oracles_limit_are_a_verdict(stage):
    stage("late", **GOOD["late"])
    layer = layers.CheckedBackend(Rank(0, 1, torch.device("cpu")), SMALL, count=2).start()
    out = layers.Outcome("")
    layer.judge(0, layer.first[0])
    layer.verdict(out, 0)
    assert out.failures == []
    layer.judge(0, 1.01 * layer.first[0])
    layer.judge(1, layer.first[1] * float("nan"))
    layer.verdict(out, 0)
    assert "2 results are beyond the limit" in out.failures[0]


# --- kill


def ended(rank, **changes):
    """Return what a process of `kill` leaves: its exit code, what it printed."""
    victim = rank == 1
    report = {"kind": "PeerFault" if victim else "ProtocolTimeout", "seconds": 3.1}
    report |= {"message": "routes_ready, partials_ready of rank 1", "again": "WindowBroken"}
    code = -signal.SIGKILL if victim else 0
    return changes.pop("code", code), "" if victim else json.dumps(report | changes)


KILLS = [
    ({}, {}, None),
    ({"kind": "RankMismatch"}, {}, "killed between, rank 0: RankMismatch"),
    ({"seconds": 6.5}, {}, "(6.5 s)"),
    ({"again": "NoneType"}, {}, "killed during backward, rank 0"),
    ({"message": "routes_ready of rank 1"}, {}, "during: no survivor named edge partials_ready"),
    ({"message": "routes_ready, partials_ready"}, {}, "no survivor named edge routes_ready"),
    ({"code": 1}, {}, "no report"),
    ({"hangs": True}, {}, "between: rank 0 still ran after 2 s"),
    ({}, {"code": 0}, "the victim ended with 0"),
    ({}, {"code": -signal.SIGSEGV}, "the victim ended with -11"),
]


@pytest.mark.parametrize(("survivor", "victim", "found"), KILLS)
def test_kill_judges_survivors_and_the_victim(monkeypatch, survivor, victim, found):
    class Process:
        def __init__(self, command, **options):
            self.rank = int(command[-1])
            changes = dict((survivor, victim)[self.rank])
            self.hangs = changes.pop("hangs", False)
            self.returncode, self.text = ended(self.rank, **changes)

        def communicate(self, timeout=None):
            if self.hangs and timeout:
                raise subprocess.TimeoutExpired("soak.py", timeout)
            return self.text, None

        def kill(self):
            self.hangs = False

    monkeypatch.setattr(faults.subprocess, "Popen", Process)
    monkeypatch.setattr(faults.dist, "TCPStore", lambda *_, **__: SimpleNamespace(port=1))
    out = faults.kill(argparse.Namespace(bound=2.0), 2)
    if found is None:
        assert out.failures == []
        assert len(out.notes) == 4
    else:
        assert any(found in text for text in out.failures), out.failures
