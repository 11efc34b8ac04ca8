"""The command-line tools on two CPU ranks: they run, they pass on good code, they fail on bad code."""

import csv
import itertools
import math
import sys
from argparse import Namespace
from collections import Counter
from dataclasses import astuple, replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from programs import ROOT, passes, run, tool

from bench import code_size, compile_report
from bench.demo.checks import FREE_STEPS, Replay, checks_of_curves, largest
from bench.demo.model import ModelConfig
from bench.demo.training import Curves, Recipe, Setup, train
from bench.floors import Load
from bench.plot import Measurement, read
from bench.sweep import COLUMNS, line
from bench.tree import tree_hash
from megamoe import jit
from megamoe.backends.reference.quant import quantize_rows
from megamoe.core.config import Problem
from megamoe.core.table import PRECISIONS
from megamoe.jit.compiler import parse_log
from megamoe.testing import SKEWED
from megamoe.testing.inputs import make_routing
from megamoe.testing.intermediates import StageChecker
from megamoe.testing.shapes import Shape

PLANTED = """
import megamoe.backends.staged as staged
good = staged.StagedBackend.forward
def bad(self, *args, **kwargs):
    y, state = good(self, *args, **kwargs)
    y[3, 7] += 1
    return y, state
staged.StagedBackend.forward = bad
"""


# A picture takes two seconds, the demo's text five: one test has each.
NO_PICTURE = """
import sys
sys.modules["matplotlib"] = None
"""
SHORT_TEXT = """
import torch
from bench.demo import model
text = open(model.__file__, "rb").read()
model.corpus = lambda: torch.frombuffer(bytearray(text), dtype=torch.uint8)
"""


@pytest.fixture
def no_picture(tmp_path):
    """Return a folder to import from, with which a tool draws none."""
    (tmp_path / "sitecustomize.py").write_text(NO_PICTURE)
    return tmp_path


def csv_rows(path: Path) -> list[dict[str, str]]:
    comment, *table = path.read_text().splitlines()
    assert comment.startswith("# ")
    return list(csv.DictReader(table))


def test_rank_check_passes():
    said = passes("rank_check.py", "--backend", "reference", "--ranks", 2, "--tokens", 17, "--precision", "bf16",
                  "--routing", "uniform", "dropped", "--repeat", 2)  # fmt: skip
    assert "2 of 2 configurations are right" in said


@pytest.mark.parametrize(("backend", "count"), [("staged", 5), ("emulate", 3)])
def test_rank_check_random_configurations(backend, count, tmp_path):
    said = passes("rank_check.py", "--backend", backend, "--ranks", 2, "--random", count,
                  "--csv", tmp_path / "cases.csv")  # fmt: skip
    assert f"{count} of {count} configurations are right" in said
    rows = csv_rows(tmp_path / "cases.csv")
    assert [(r["backend"], r["ranks"], r["verdict"]) for r in rows] == [
        (backend, "2", "ok")
    ] * count
    for precision in {r["precision"] for r in rows}:
        y, fp32 = (
            max(float(r[name]) for r in rows if r["precision"] == precision)
            for name in ("y", "y_fp32")
        )
        if (
            backend == "emulate"
        ):  # which rounds where the first oracle does; staged sums no partials
            assert y < fp32
        assert f"{precision}: worst relative error of y {y:.2e}, against fp32" in said


def test_rank_check_finds_one_wrong_element(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(PLANTED)
    done = run("rank_check.py", "--backend", "staged", "--ranks", 2, "--tokens", 17, "--precision", "bf16",
               path=tmp_path)  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAIL on ranks [0, 1]" in done.stdout
    assert "first at [3, 7]" in done.stdout


@pytest.mark.parametrize(
    ("direction", "cases", "good"),
    [
        ("backward", ["--random", 5], 5),
        ("step", ["--bias", "--tokens", 40, "--routing", "one_expert", "dropped"], 4),
    ],
)
def test_rank_check_of_gradients(direction, cases, good, tmp_path):
    said = passes("rank_check.py", "--backend", "staged", "--ranks", 2, *cases, "--repeat", 2,
                  "--direction", direction, "--csv", tmp_path / "cases.csv")  # fmt: skip
    assert f"{good} of {good} configurations are right" in said
    rows = csv_rows(tmp_path / "cases.csv")
    assert [r["direction"] for r in rows] == [direction] * good
    names = ["dx", "d_topk_weights", "dw13", "dw2"] + ["db13", "db2"] * (direction == "step")
    for name in names:
        assert max(float(r[f"{name}_fp32"] or 0) for r in rows) > 0, name
    assert ("y" in rows[0]) == (direction == "step")


def test_rank_check_of_passes_on_one_rank():
    """One rank has several, the other one: what both do together must not depend on it."""
    said = passes("rank_check.py", "--backend", "emulate", "--ranks", 2, "--tokens", 180, "--precision", "bf16",
                  "--direction", "step", "--least-pool", "--routing", "one_rank", "uniform", "--top-k", 3,
                  "--verbose")  # fmt: skip
    assert "2 of 2 configurations are right" in said
    one_rank, uniform = said.split("\nok: ")[1:]
    assert "dgu" not in one_rank  # stages of the last pass are those of no pass before
    assert "dx_fp32" in one_rank
    assert "least pool" in uniform


def test_rank_check_finds_a_wrong_scale_of_gradients(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(SCALED)
    done = run("rank_check.py", "--backend", "staged", "--ranks", 2, "--tokens", 40, "--precision", "bf16",
               "--direction", "backward", path=tmp_path)  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    for name in ("dx", "dw13", "dw2"):
        assert f"FAIL {name}_fp32" in done.stdout


def stages(precision: str) -> dict[str, torch.Tensor]:
    """Return h (and h_scale) and y of 64 rows as a right result might be."""
    torch.manual_seed(0)
    h, y = torch.randn(64, 512) * torch.randn(64, 512), torch.randn(64, 256).bfloat16()
    if precision == "bf16":
        return {"h": h.bfloat16(), "y": y}
    q, scale = quantize_rows(h)
    return {"h": q, "h_scale": scale, "y": y}


def is_good(name: str, got: dict[str, torch.Tensor], precision: str) -> bool:
    checker = StageChecker(Problem(256, 512, 8, 2, precision=precision))
    checker.compare_stage(name, got, stages(precision), rows=64)
    return checker.good


def move(h: torch.Tensor, steps: int) -> None:
    """Move the largest elements of three rows towards zero, by steps of their format."""
    bits = h.view(torch.uint8 if h.dtype == torch.float8_e4m3fn else torch.int16)
    columns = h[:3].float().abs().argmax(1)
    bits[torch.arange(3), columns] -= steps


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_one_rounding_step_is_right_and_two_are_wrong(precision):
    for steps in (0, 1, 2):
        got = stages(precision)
        move(got["h"], steps)
        assert is_good("h", got, precision) == (steps < 2)
    got = stages(precision)
    got["y"][5, 7] *= 1 + 2**-7
    assert is_good("y", got, precision)
    got["y"][5, 7] += 3
    assert not is_good("y", got, precision)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("name", ["h", "y"])
def test_a_wrong_row_or_nan_is_wrong(precision, name):
    got = stages(precision)
    got[name].view(torch.uint8)[9] = got[name].view(torch.uint8)[8]
    assert not is_good(name, got, precision)
    got = stages(precision)
    got[name].view(torch.uint8)[9] = 0xFF
    assert not is_good(name, got, precision)


def test_a_step_in_the_scale_is_noise_and_a_wrong_scale_is_not():
    for factor, good in ((1.0005, True), (1.05, False)):
        got = stages("fp8")
        got["h_scale"][4, 1] *= factor
        assert is_good("h_scale", got, "fp8") == good
        assert is_good("h", got, "fp8")  # 5 % of one group are less than a step
    got["h_scale"][4, 1] *= 2
    assert not is_good("h", got, "fp8")


def test_copies_are_compared_bit_by_bit():
    x = torch.randn(4, 256).bfloat16()
    checker = StageChecker(Problem(256, 512, 8, 2))
    checker.compare_stage("x_pool", {"x_pool": x.clone()}, {"x_pool": x}, rows=4)
    assert checker.good
    changed = x.clone()
    changed.view(torch.int16)[3, 3] += 1
    checker.compare_stage("x_pool", {"x_pool": changed}, {"x_pool": x}, rows=4)
    assert not checker.good


def test_latency_sweep_writes_a_table(tmp_path):
    said = passes("latency_sweep.py", "--shape", "tiny", "--backend", "staged", "--ranks", 2, "--tokens", 8, 16,
           "--samples", 3, "--out", tmp_path, "--precision", "fp8", "--quantized-x",
           "--routing", "uniform", "skewed", "one_expert")  # fmt: skip
    rows = csv_rows(tmp_path / "latency.csv")
    columns = [(r["tokens"], r["routing"], r["direction"]) for r in rows]
    routings = "uniform", "skewed", "one_expert"
    assert columns == list(itertools.product(("8", "16"), routings, ("forward", "e4m3 x")))
    assert all(float(r["us"]) > 0 for r in rows)
    assert "staged skewed" in said
    assert (tmp_path / "latency.png").exists() == (find_spec("matplotlib") is not None)
    again = [tuple(map(str, astuple(m))) for m in read(tmp_path / "latency.csv")[1]]
    assert again == [tuple(v or "None" for v in row.values()) for row in rows]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_line_of_the_sweep_has_the_precision_in_a_column_of_its_own(precision):
    measured = Measurement("dsv3", precision, 1, 8, "cool", "mega", 1, 1, None, None, 1, 1, 1)
    assert line(measured).split()[:3] == ["dsv3", precision, "cool"]
    assert line(measured).index("cool") == COLUMNS.index("mode")


# Time stands still but for calls, which take what is planted: ranks' medians are 30 and 60 us, means and minima others.
PLANTED_TIMES = """
import itertools, time
import bench.layers as layers
import torch.distributed as dist
now, samples = [0.0], [itertools.cycle(us) for us in ((10, 90, 20, 80, 30), (50, 990, 40, 400, 60))]
class Contender(layers.Contender):
    def __getattribute__(self, name):
        found = super().__getattribute__(name)
        if name != "timed":
            return found
        def timed(before):
            now[0] += next(samples[dist.get_rank()]) * 1e-6
            return found(before)
        return timed
layers.Contender = Contender
time.perf_counter = lambda: now[0]
"""


def test_a_figure_is_the_median_of_samples_then_the_maximum_over_ranks(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(NO_PICTURE + PLANTED_TIMES)
    said = passes("latency_sweep.py", "--shape", "tiny", "--backend", "staged", "--ranks", 2, "--tokens", 8,
                  "--mode", "both", "--samples", 5, "--out", tmp_path, path=tmp_path)  # fmt: skip
    assert f", tree {tree_hash(ROOT)}: " in said.splitlines()[0]
    assert (tmp_path / "latency.csv").read_text().startswith(said.splitlines()[0] + "\n")
    rows = csv_rows(tmp_path / "latency.csv")
    assert [r["mode"] for r in rows] == ["cool", "hot"]
    assert [float(r["us"]) for r in rows] == pytest.approx([60.0, 60.0], abs=1e-6)
    flops = 2 * 8 * 2 * 3 * 64 * 48  # tokens, top_k, matrices, H, I
    assert [float(r["tflops"]) for r in rows] == pytest.approx([flops / 60e-6 / 1e12] * 2)
    line = said.splitlines()[-2].split()
    assert "60.0" in line


def test_skewed_routing_is_by_popularity():
    """Tokens take different experts; of the first choices alone the n-th expert has 1/n of the most wanted one's."""
    p = Problem(64, 64, 8, 1, max_tokens=40_000)
    counts = []
    for top_k in (1, 3):
        dice = torch.Generator().manual_seed(3)
        ids = make_routing(replace(p, top_k=top_k), 40_000, SKEWED, generator=dice)
        assert all(len(set(token)) == top_k for token in ids[:100].tolist())
        counts.append(torch.bincount(ids[:, 0], minlength=8).sort(descending=True).values)
    expected = 1 / torch.arange(1.0, 9.0)
    torch.testing.assert_close(
        counts[0] / counts[0].sum(), expected / expected.sum(), atol=0.01, rtol=0
    )


@pytest.mark.parametrize(
    "direction", [pytest.param("backward", marks=pytest.mark.slow), "train", "step"]
)
def test_latency_sweep_of_training(direction, no_picture):
    passes("latency_sweep.py", "--shape", "tiny", "--backend", "reference", "--ranks", 1, "--tokens", 8,
           "--samples", 1, "--direction", direction, "--main-grad", "--precision", "fp8", "--reserve-sms", 0, "default",
           "--weight-gradients", "bf16", "e4m3", "--baseline", "staged", "autograd", "gemms", "itself",
           "--local-experts-of", 3, "--out", no_picture, path=no_picture)  # fmt: skip
    rows = csv_rows(no_picture / "latency.csv")
    kinds = [f"{g} by {p}" for p in ("bf16", "e4m3") for g in ("bf16", "main_grad")]
    own = [("reference", "fp8", kind, r) for kind in kinds for r in ("0", "")]
    quantizes = [("reference", "fp8", "", "")] * (direction == "step")
    names = ("staged", "autograd", "gemms", "reference")
    baselines = [(name, "bf16", "bf16", "") for name in names]
    columns = ("backend", "precision", "gradients", "reserve_sms")
    assert [tuple(r[c] for c in columns) for r in rows] == own + quantizes + baselines
    assert {r["shape"] for r in rows} == {"tiny/ep3"}
    assert {r["direction"] for r in rows} == {direction, *["quantize"] * (direction == "step")}
    assert all(float(r["us"]) > 0 for r in rows)
    flops = {r["direction"]: float(r["tflops"]) * float(r["us"]) for r in rows}
    rows_of_gemms = 8 * 2 * 3 * 64 * 48  # tokens, top_k, planes, H, I
    times = {"train": 1, "backward": 2, "step": 3}[direction]
    assert flops[direction] == pytest.approx(times * 2 * rows_of_gemms / 1e6)


def test_latency_sweep_of_passes_whose_weight_gradients_are_made_at_once(no_picture):
    given = ("latency_sweep.py", "--shape", "tiny", "--tokens", 8, "--samples", 1, "--direction", "backward",
             "--main-grad", "--out", no_picture)  # fmt: skip
    passes(*given, "--backend", "emulate", "--passes", 1, 2, path=no_picture)
    rows = csv_rows(no_picture / "latency.csv")
    kinds = ("bf16", "main_grad")
    labels = [*kinds, *(f"{kind} of {n}" for kind in kinds for n in (1, 2))]
    assert [r["gradients"] for r in rows] == labels
    floors = {r["gradients"]: float(r["hbm_floor_us"]) for r in rows}
    assert floors["main_grad of 2"] < floors["main_grad of 1"] == floors["main_grad"]
    assert all(
        float(r["tflops"]) * float(r["us"]) == pytest.approx(2 * 8 * 2 * 3 * 64 * 48 * 2 / 1e6)
        for r in rows
    )
    refused = run(*given, "--backend", "reference", "--passes", 2)
    assert refused.returncode != 0
    assert "--passes 2: reference keeps at most 0" in refused.stdout + refused.stderr


@pytest.mark.parametrize(("ranks", "top_k"), [(1, 2), (2, 1), (2, 3), (4, 2), (4, 4)])
def test_floors_count_what_crosses_links(ranks, top_k):
    """Against all choices of distinct experts, one by one."""
    experts = 8
    choices = list(itertools.combinations(range(experts), top_k))
    others = [len({e * ranks // experts for e in c} - {0}) for c in choices]
    load = Load(Shape("small", 64, 32, experts, top_k), 100, ranks)
    assert load.crossings == pytest.approx(100 * sum(others) / len(choices))
    assert load.forward("bf16")[2] == pytest.approx(load.crossings * 64 * (2 + 2))
    assert load.forward("fp8")[2] == pytest.approx(load.crossings * 64 * (1 + 2))
    assert load.weights == experts / ranks * 3 * 64 * 32
    assert 0 < load.hit_weights <= load.weights


def test_a_sweep_of_before_training_is_read(tmp_path):
    table = tmp_path / "old.csv"
    names = "shape,precision,ranks,tokens,mode,backend,us,tflops,clock_ghz,utilisation"
    floors = "gemm_floor_us,hbm_floor_us,nvlink_floor_us"
    table.write_text(f"# title\n{names},{floors}\ndsv3,fp8,4,8,cool,mega,10.5,1.5,,,1,2,3\n")
    title, (found,) = read(table)
    assert (title, found.us, found.direction, found.ctas) == ("# title", 10.5, "forward", None)
    assert found.contender == "mega"


def test_train_step_equals_one_rank():
    said = passes("train_step.py", "--ranks", 2, "--backend", "staged", "--steps", 3, "--batch", 4,
                  "--target", 6)  # fmt: skip
    assert said.count("PASS") == 7
    assert "peak memory" in said


# Faults of a layer whose experts are spread over ranks. Loss curves hide both for long; AdamW hides the second.
STALE = """
import megamoe.backends.staged as staged
from megamoe import ExpertWeights
good = staged.StagedBackend.forward
def bad(self, call, keep=False):
    if self.problem.ep_size > 1:
        if not hasattr(self, "first"):
            named = call.weights.named().items()
            self.first = ExpertWeights(**{n: t.detach().clone() for n, t in named})
        call = call._replace(weights=self.first)
    return good(self, call, keep)
staged.StagedBackend.forward = bad
"""
SCALED = """
from megamoe.backends.rail import Crossing
good = Crossing.backward
Crossing.backward = staticmethod(lambda ctx, grad: good(ctx, grad * 1.1))
"""


@pytest.mark.parametrize(
    ("fault", "found"), [(STALE, "losses of steps"), (SCALED, "experts' gradients there")]
)
def test_train_step_finds_planted_faults(fault, found, tmp_path):
    """The checks from equal parameters do, which are those that count on GPUs."""
    (tmp_path / "sitecustomize.py").write_text(SHORT_TEXT + fault)
    done = run("train_step.py", "--ranks", 2, "--steps", 3, "--batch", 4, "--target", 1,
               "--compare-steps", 1, path=tmp_path)  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAIL: loss fell" in done.stdout  # and the target is missed
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAIL")]
    assert any(line.startswith(f"FAIL: {found}") for line in failed), done.stdout


@pytest.mark.parametrize(("loss", "good"), [(5.501, True), (5.6, False)])
def test_runs_that_part_are_compared_where_they_are_equal(loss, good):
    """On GPUs runs part after the first step, by chance; a wrong first step is seen."""
    args = Namespace(loss_tolerance=5e-3, norm_tolerance=0.05)
    mine, other = Curves([5.5, 4.0], [[1.0, 1.0], [2.0, 2.0]]), Curves([loss], [[1.0, 1.02]])
    found = [apart <= limit for _, apart, limit, _ in checks_of_curves(mine, other, args)]
    assert found == [good, True, True]
    assert FREE_STEPS["cuda"] == 1


def compiled(log):
    return jit.CompileResult(cubin=b"123", log=log, seconds=0, **parse_log(log))


def test_compile_report_refuses_a_log_without_figures():
    """As it is when a compiler takes the cubin from a cache of its own: 0 registers are no measurement."""
    variant, used = jit.Variant("bf16", "swiglu"), "ptxas info : Used 128 registers"
    (fault,) = compile_report.check(variant, compiled(""), None)
    assert fault.startswith("no figures")
    assert compile_report.check(variant, compiled(used), None) == []
    assert compile_report.check(variant, compiled(used + "\n 8 bytes spill stores"), None) == [
        "8 bytes spilled"
    ]


def test_code_is_counted_by_the_calls_around_it(tmp_path, monkeypatch):
    """Two calls of one epilogue are two copies; lines stand innermost first, and fillings do not count."""
    monkeypatch.setattr(code_size.paths, "CSRC", tmp_path)
    source = tmp_path / "megamoe" / "roles" / "math.cuh"
    source.parent.mkdir(parents=True)
    source.write_text(
        "MEGAMOE_DEVICE void math() {\n a;\n b;\n}\nMEGAMOE_DEVICE void load_a(int) {\n}\n"
    )
    epilogue = tmp_path / "megamoe" / "epilogue" / "plain.cuh"
    epilogue.parent.mkdir()
    epilogue.write_text(
        "template <class T>\n// MEGAMOE_DEVICE void gone()\nMEGAMOE_DEVICE void run() {\n c;\n}\n"
    )

    def code(*calls, of=2):
        # the cubin was compiled in a folder that is gone
        files = [(str(file).replace(str(tmp_path), "/gone"), line) for file, line in calls]
        lines = [f'//## File "{file}", line {line} inlined at "x", line 1' for file, line in files]
        return "\n".join([*lines, *["        /*0a10*/  @!P0 IADD3 R1, R1 ;"] * of])

    size = code_size.code_size(
        "\n".join(
            [
                code((epilogue, 4), (source, 2)),
                code((epilogue, 4), (source, 3), of=3),
                code((source, 2)),
                code((source, 6), of=1),
                "        /*0b10*/  NOP ;",
                code((tmp_path / "none.cu", 1), of=1),
            ]
        )
    )
    assert size.kernel == 9 * 16
    assert size.roles == {"math": 7 * 16, "load_a": 16, "other": 16}
    assert (size.epilogues, size.loops) == ([2 * 16, 3 * 16], [])


def test_compile_report_shows_what_moved(tmp_path, capsys, monkeypatch):
    result = compiled("Used 128 registers")
    old, new = (compile_report.figures(result, Counter(HGMMA=n, MOV=5, NOP=9)) for n in (24, 23))
    compile_report.show_changes({"a": old, "b": old, "gone": old}, {"a": new, "b": old, "new": new})
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()[2:]]
    assert lines == [
        ["a", "instr 29 -> 28, HGMMA 24 -> 23"],
        ["b", "equal"],
        ["gone", "only before"],
        ["new", "only after"],
    ]
    monkeypatch.setattr(sys, "argv", ["compile_report.py", "--against", str(tmp_path / "nothing")])
    with pytest.raises(SystemExit) as left:
        tool("compile_report").main()
    assert left.value.code == 2
    assert "made by --sass" in capsys.readouterr().err


def test_a_nan_is_the_largest_difference():
    assert math.isnan(largest((0.0, float("nan"), 1.0)))
    assert largest((1.0, 3.0, 2.0)) == 3


def test_replay_sees_other_arithmetic(alone):
    """One FP8 step from the parameters of a bf16 run has other gradients, and nearly the same loss."""
    recipe = Recipe(ModelConfig(), batch=2, steps=2)
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8)
    here = (recipe, text, torch.device("cpu"), alone)
    run, fp8 = (Setup(*here, {"backend": "staged", "precision": p}) for p in ("bf16", "fp8"))
    same, other = (Replay(setup, recipe.steps, replays=6) for setup in (run, fp8))

    def inspect(*step):
        same.inspect(*step)
        other.inspect(*step)

    train(run, "bf16", inspect=inspect)
    assert same.apart["loss"] < 5e-3
    assert max(same.apart["dense"], same.apart["experts"]) < 1e-5
    assert other.apart["loss"] < 5e-3
    assert 0.02 < other.apart["experts"] < 0.5
    assert other.apart["dense"] > 1e-3
