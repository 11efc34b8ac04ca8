"""Tools for layers over hosts: the model, launches that were measured, the wire that spins, what a fabric gives."""

from argparse import Namespace
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from programs import passes, run

from bench.hosts import plan, spin
from bench.hosts.model import (
    Fabric,
    Given,
    interpolated,
    launch_us,
    other_hosts,
    pipeline_us,
    predict,
)
from megamoe.backends.call import Backend, Call, GradRequest, Needs
from megamoe.backends.hosts.backend import HostsBackend
from megamoe.backends.select import make_backend
from megamoe.core.config import Problem
from megamoe.formats.weights import ExpertWeights, TransposedWeights
from megamoe.testing import assert_close, make_inputs, make_weights
from megamoe.testing.shapes import SHAPES

# (shape, precision, tokens, hosts, groups) -> us that the design of 2026-11-23 has for launch and wire; the layer's are
# those of the glue of 2026-11-26
DESIGN = {
    ("dsv3", "fp8", 8192, 2, None): (5722, 3927, 8042),
    ("dsv3", "fp8", 8192, 4, None): (5716, 10580, 11449),
    ("dsv3", "fp8", 8192, 8, (8, 4)): (5714, 13643, 14543),
    ("dsv3", "fp8", 128, 4, None): (205, 224, 880),
    ("dsv3", "bf16", 8192, 2, None): (9966, 5160, 13046),
    ("qwen3-235b", "fp8", 8192, 2, None): (2467, 2276, 3836),
    ("qwen3-30b", "fp8", 8192, 8, None): (639, 5278, 5875),
}


@pytest.mark.parametrize("case", DESIGN)
def test_the_model_is_the_designs(case):
    name, precision, tokens, hosts, groups = case
    found = predict(SHAPES[name], precision, tokens, hosts, Fabric(), Given(groups=groups))
    times = found.launch, found.wire, found.two_level
    assert times == pytest.approx(DESIGN[case], rel=0.01)


def test_packed_weights_are_read_in_less_time():
    def us(precision):
        return launch_us(SHAPES["dsv3"], precision, 8, 2, Fabric()) - 30

    assert us("bf16") == pytest.approx(4 * us("bf16xmxfp4"), rel=0.01)
    assert us("fp8") == pytest.approx(2 * us("fp8xmxfp4"), rel=0.01)


def test_other_hosts_are_those_of_tokens_that_are_drawn():
    shape, hosts = SHAPES["qwen3-30b"], 4
    ids = torch.rand(20_000, shape.num_experts).topk(shape.top_k).indices
    owners = torch.stack([(ids * hosts // shape.num_experts == h).any(1) for h in range(1, hosts)])
    assert other_hosts(shape, hosts) == pytest.approx(float(owners.sum(0).float().mean()), rel=0.01)
    assert other_hosts(SHAPES["dsv3"], 8, (8, 4)) == 3.5


def test_a_pipeline_hides_the_shorter_of_wire_and_launches():
    assert pipeline_us(1, 10, 100, 20) == 130
    assert pipeline_us(4, 10, 100, 20) == 10 + 400 + 20
    assert pipeline_us(4, 50, 10, 60) == pytest.approx(4 * 110, rel=0.1)


def test_launches_that_were_measured_take_the_models_place():
    us = interpolated([(1000, 300.0), (100, 100.0)])
    assert [us(t) for t in (10, 100, 550, 1000, 1900)] == [100, 100, 200, 300, 500]
    shape = SHAPES["dsv3"]
    found = predict(shape, "fp8", 1000, 2, Fabric(), Given(us, chunks=(1,)))
    gathered, summed = (found.others + 1) * 2 * 7456, (found.others + 2) * 14336
    passes = 1000 * (14336 + 7456 + gathered + summed) / 3e6
    assert found.launch == 300
    assert found.two_level == pytest.approx(300 + found.wire + 365 + 80 + passes)


def test_the_plan_says_when_hosts_are_worth_it(tmp_path):
    table = tmp_path / "sweep.csv"
    head = "shape,precision,ranks,tokens,mode,backend,us,tflops,clock_ghz,utilisation"
    floors = "gemm_floor_us,hbm_floor_us,nvlink_floor_us"
    rows = [f"dsv3/ep16,fp8,1,{t},cool,{b},{us},1,,,1,2,3" for t, b, us in (
        (1024, "mega", 900), (8192, "mega", 6000), (8192, "staged", 5))]  # fmt: skip
    table.write_text("\n".join(["# title", f"{head},{floors}", *rows]) + "\n")
    picture = tmp_path / "plan.png"
    options = ("--shape", "dsv3", "--hosts", 2, 8, "--tokens", 8192)
    said = passes("hosts_plan.py", *options, "--sweep", table, "--plot", picture)
    two, eight = (line.split() for line in said.splitlines() if line.startswith("   8192"))
    assert "launches measured" in said
    assert (two[1], two[4], two[-5:]) == ("2", "6000", ["wire", "fits", "beside", "the", "launch"])
    assert "wire bound: PP, or DDP from 24 k tokens a step on" in " ".join(eight)
    assert picture.stat().st_size > 1000
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['matplotlib'] = None")
    said = passes("hosts_plan.py", *options, "--plot", tmp_path / "none.png", path=tmp_path)
    assert said.endswith("\nno picture without matplotlib\n")
    assert not (tmp_path / "none.png").exists()
    refused = run("hosts_plan.py", "--shape", "qwen3-30b", "--sweep", table)
    assert refused.returncode == 1
    assert "no forward of qwen3-30b in fp8 by mega" in refused.stderr


# --- the wire that spins ---

PROBLEM = Problem(64, 48, 6, 2, ep_size=3, max_tokens=48)
MIRRORED = Problem(144, 144, 6, 2, ep_size=3, max_tokens=48)
WIRE_US, LAUNCH_US = 8000, 20000


class Clock:
    """Stands still but for those who sleep, so that a busy machine changes nothing."""

    now = 0.0

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class Sleeping(Backend):
    """In the place of a launch: takes its time, and says what it was given."""

    def __init__(self, clock):
        self.calls, self.clock = [], clock

    def forward(self, call, keep=False):
        self.clock.sleep(LAUNCH_US / 1e6)
        self.calls.append(call)
        return torch.zeros(call.x.shape, dtype=torch.bfloat16), None

    def statistics(self):
        return SimpleNamespace(tokens_per_expert=torch.zeros(2), passes=torch.ones(1))


def one_behind_the_other(self, plan, rows, _, compute, *more):
    """A flaw: nothing travels while a chunk is computed."""
    tokens = plan.tokens.split([sum(of) for of in plan.send])
    back = [torch.zeros(1, rows.shape[1]).bfloat16()]
    for i in range(self.chunks):
        result = compute(i, self.planner.engine(rows[tokens[i]], plan.send[i], plan.receive[i])())
        back.append(self.planner.engine(result, plan.receive[i], plan.send[i])())
    return torch.cat(back)


def spun(exchange, monkeypatch):
    """Return us of a call of four chunks, the engine, and what was computed."""
    clock = Clock()
    monkeypatch.setattr(spin, "time", clock)
    engine = spin.Spinning(lambda num_bytes: WIRE_US, torch.device("cpu"), PROBLEM, exchange)
    links, inner = spin.StandIn(3), Sleeping(clock)
    options = {"chunks": 4, "exchange": exchange, "engine": engine}
    backend = HostsBackend(PROBLEM, links, lambda problem: inner, **options)
    given = make_inputs(PROBLEM, 48)
    call = Call(given.x, given.topk_ids, given.topk_weights, make_weights(PROBLEM))
    backend.forward(call)
    return clock.now * 1e6, engine, inner.calls


@pytest.mark.parametrize("exchange", ["exact", "static"])
def test_chunks_travel_while_others_are_computed(exchange, monkeypatch):
    us, engine, calls = spun(exchange, monkeypatch)
    assert engine.busy_us == 9 * WIRE_US  # ids and weights, four ways out, four back
    first, chunk = 2 * WIRE_US, WIRE_US  # before the first launch, behind the last
    assert us == pytest.approx(first + 4 * LAUNCH_US + chunk)
    # what comes from other hosts has experts of this one
    assert all(((call.topk_ids >= 0) & (call.topk_ids < 2)).any(1).sum() > 10 for call in calls)
    monkeypatch.setattr(HostsBackend, "_pipelined", one_behind_the_other)
    us, *_ = spun(exchange, monkeypatch)
    assert us == pytest.approx(9 * WIRE_US + 4 * LAUNCH_US)


def test_the_tool_measures_what_it_can_here(capsys, tmp_path):
    threads = torch.get_num_threads()
    args = Namespace(
        shape=["tiny"], hidden=None, intermediate=None, num_experts=None, top_k=None,
        activation=None, bias=None, precision=["fp8"], hosts=[2], tokens=[64], per_host=1,
        gb_s=46.0, latency_us=15000.0, hbm_gb_s=3000.0, host_us=0.0, chunks=3, reserve_sms=None, cpu=True,
        exchange=["exact", "static"], out=tmp_path / "spin.csv",
    )  # fmt: skip
    try:
        assert spin.run(args) == 0
    finally:
        torch.set_num_threads(threads)
    *_, first, second = capsys.readouterr().out.splitlines()
    for line, exchange in (first, "exact"), (second, "static"):
        words = line.split()
        assert words[:9] == ["tiny", "fp8", "64", "tokens", "2", "hosts", "3", "chunks", exchange]
        assert float(words[words.index("wire") + 1]) == pytest.approx(7 * 15000, rel=0.01)
        assert float(words[words.index("layer") + 1]) > 7 * 15000
        assert float(words[words.index("host") + 1]) > 7 * 15000  # a CPU waits for all
    title, names, *cells = (tmp_path / "spin.csv").read_text().splitlines()
    assert title.startswith("# ")
    assert [row.split(",")[names.split(",").index("exchange")] for row in cells] == [
        "exact",
        "static",
    ]


@pytest.mark.parametrize("name", ["reference", "emulate"])
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_mirrored_hosts_compute_a_layer(name, precision):
    """exact and static have the same rows, so the same bits: those of one rank with all experts, but for roundings.

    An expert has the rows of its images on all hosts, so its gradients are the sums of theirs.
    """
    problem = replace(MIRRORED, precision=precision)
    drawn, weights = make_inputs(problem, 48), make_weights(problem)
    in_bf16 = precision == "bf16"  # otherwise gradients are those of masters, which are not here
    dy, needs = torch.randn_like(drawn.x), Needs(w13=in_bf16, w2=in_bf16, b13=False, b2=False)

    def wanted(p, w):
        return GradRequest(needs, transposed=None if in_bf16 else TransposedWeights.of(p, w))

    found = {}
    for exchange in ("exact", "static"):
        engine = spin.Spinning(lambda _: 0.0, torch.device("cpu"), problem, exchange)
        options = {"chunks": 2, "exchange": exchange}
        backend = spin.over_hosts(problem, 3, name, torch.device("cpu"), engine, **options)
        call = Call(drawn.x, drawn.topk_ids, drawn.topk_weights, weights)
        y, state = backend.forward(call, keep=True)
        found[exchange] = {"y": y} | of(backend.backward(call, dy, state, wanted(problem, weights)))
        backend.close()
    for what, value in found["exact"].items():
        assert torch.equal(value, found["static"][what]), what
    whole = {
        n: torch.cat([t.view(torch.uint8)] * 3).view(t.dtype) for n, t in weights.named().items()
    }
    of_one = replace(problem, ep_size=1)
    alone = make_backend("reference", of_one, "alone", device=torch.device("cpu"))
    everything = call._replace(weights=ExpertWeights(**whole))
    expected_y, state = alone.forward(everything, keep=True)
    assert_close(found["exact"]["y"], expected_y, relative=5e-3)
    expected = alone.backward(everything, dy, state, wanted(of_one, everything.weights))
    for what, value in of(expected).items():
        images = [value] if what in ("x", "topk_weights") else value.float().chunk(3)
        assert_close(found["exact"][what], sum(images), relative=1e-2)


def of(gradients):
    found = {n: getattr(gradients, n) for n in ("x", "topk_weights", "w13", "w2")}
    return {n: t for n, t in found.items() if t is not None}


def test_the_rails_of_a_machine_are_measured():
    said = passes("rail_bench.py", "--cpu", "--ranks", 4, "--fake-hosts", 2, "--kb", 4, 64, "--repeats", 2)  # fmt: skip
    first, second = (line.split() for line in said.splitlines()[-2:])
    assert (first[0], second[0]) == ("4", "64")
    for kb, us, gb_s, *_ in (first, second):
        assert float(gb_s) == pytest.approx(int(kb) * 1024 / float(us) / 1e3, abs=0.006)
    alone = run("rail_bench.py", "--cpu", "--ranks", 2)
    assert alone.returncode != 0
    assert "all ranks are on" in alone.stdout


FAULT = """
from megamoe.backends.hosts.backend import HostsBackend
good = HostsBackend._summed
HostsBackend._summed = lambda *given: good(*given) * 1.5
"""


@pytest.mark.slow
def test_the_demo_trains_over_fake_hosts(tmp_path):
    demo = ("train_step.py", "--cpu", "--ranks", 4, "--fake-hosts", 2, "--backend", "reference",
            "--steps", 3, "--batch", 4, "--target", 6, "--compare", "one-rank")  # fmt: skip
    assert passes(*demo).count("PASS") == 7
    (tmp_path / "sitecustomize.py").write_text(FAULT)
    done = run(*demo, path=tmp_path)
    assert done.returncode == 1
    assert "FAIL: experts' gradients there" in done.stdout


def test_shapes_of_the_plan_are_named():
    refused = run("hosts_plan.py", "--sweep", "nowhere.csv")
    assert "--sweep nowhere.csv: no such file" in refused.stderr
    assert plan.measured(None, SHAPES["tiny"], "fp8") is None


@pytest.mark.parametrize(
    "words", ["--hosts 1", "--hosts 2 --gb-s 0", "--hosts 2 --groups 0 0", "--tokens nan"]
)
def test_numbers_that_mean_nothing_are_refused_by_name(words):
    refused = run("hosts_plan.py", "--shape", "qwen3-30b", *words.split())
    assert refused.returncode == 2
    assert "Traceback" not in refused.stderr
    assert f"argument {words.split()[-2 if '--groups' not in words else 2]}" in refused.stderr
