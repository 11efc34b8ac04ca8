"""The tools that train, without a GPU: the reference backend stands for the kernel; faults are planted."""

import re
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from bench.check import backward, oracle
from bench.check.cases import Case
from bench.demo import curves
from bench.demo.curves import compare_curves, read, runs, summarize
from bench.demo.model import ModelConfig
from bench.demo.training import Recipe, Setup, train
from bench.ranks import Rank
from bench.soak import training
from bench.soak.layer import Outcome
from bench.soak.training import ROUTES, Trainer, verdict
from bench.tables import write_table
from megamoe.backends.call import Gradients
from megamoe.backends.reference import ReferenceBackend
from megamoe.core.config import Problem
from megamoe.testing.gradients import GradientChecker
from megamoe.testing.shapes import shape


class Faulty(ReferenceBackend):
    """Does something to the gradients of one of its calls."""

    calls, wrong_call = 0, 5

    def spoil(self, gradients):
        """Plant a fault."""

    def backward(self, call, dy, state, wanted):
        gradients = super().backward(call, dy, state, wanted)
        self.calls += 1
        if self.calls == self.wrong_call:
            self.spoil(gradients)
        return gradients


class OtherBits(Faulty):
    wrong_call = 30  # of the repeat

    def spoil(self, gradients):
        gradients[0].view(torch.int16).flatten()[7] ^= 1 << 10


class NotFinite(Faulty):
    def spoil(self, gradients):
        gradients[1].flatten()[3] = float("nan")


class NoGradient(ReferenceBackend):
    def backward(self, call, dy, state, wanted):
        made = super().backward(call, dy, state, wanted._replace(into={}))
        return Gradients(*[g if g is None else torch.zeros_like(g) for g in made])


@pytest.mark.parametrize(
    ("backend", "found", "precision"),
    [
        (ReferenceBackend, [], "bf16"),
        (ReferenceBackend, [], "fp8"),
        (OtherBits, ["a repeat has other bits", "a repeat ends with other weights"], "fp8"),
        (NotFinite, ["values of gradients are not finite", "a repeat has other bits"], "bf16"),
        (NoGradient, ["no weight has moved"], "fp8"),
    ],
)
def test_soak_train_says_what_differs_in_a_repeat(backend, found, precision):
    problem = Problem(64, 48, 6, 2, max_tokens=40, precision=precision)
    layers = [ReferenceBackend(problem), backend(problem)]
    if backend is NoGradient:
        layers = [backend(problem), backend(problem)]
    trainer, out = Trainer(Rank(0, 1, torch.device("cpu")), layers, steps=12), Outcome("")
    runs = [trainer.run(12, lambda: None) for _ in range(2)]
    verdict(out, trainer, runs)
    assert bool(out.failures) == bool(found)
    for text in found:
        assert any(text in failure for failure in out.failures), out.failures


@pytest.mark.parametrize(("products", "lost"), [("bf16", False), ("e4m3", False), ("e4m3", True)])
def test_soak_train_sees_copies_that_a_step_left_behind(products, lost, monkeypatch):
    """The fault: steps that nobody counts, as in a graph's replays, and no quantization behind them."""
    problem = Problem(64, 48, 6, 2, max_tokens=40, precision="fp8")
    layers = [ReferenceBackend(problem, weight_gradients=products) for _ in range(2)]
    trainer, out = Trainer(Rank(0, 1, torch.device("cpu")), layers, 3, products), Outcome("")
    if lost:
        monkeypatch.setattr(trainer, "_follow", lambda: None)
        monkeypatch.setattr(training, "descend", lambda w, gradient: w.data.mul_(0.5))
    runs = [trainer.run(3, lambda: None) for _ in range(2)]
    assert trainer.label in verdict(out, trainer, runs)
    assert [f for f in out.failures if "stale" in f] == [
        f"fp8 by {products}: {trainer.stale} quantized copies were stale"
    ] * lost
    assert bool(trainer.stale) == lost


def test_soak_train_draws_every_routing_and_odd_numbers_of_tokens():
    problem = Problem(64, 48, 6, 2, max_tokens=40)
    trainer = Trainer(Rank(0, 1, torch.device("cpu")), [ReferenceBackend(problem)] * 2, steps=1)
    drawn = [batch for n in range(40) for batch in trainer.draw(n)]
    tokens = {inputs.x.shape[0] for inputs, _ in drawn}
    assert {0, 1, 40} < tokens
    assert any(count is not None and int(count) < inputs.x.shape[0] for inputs, count in drawn)
    assert {inputs.topk_ids.dtype for inputs, _ in drawn} == {torch.int32, torch.int64}
    full = [inputs for inputs, _ in drawn if inputs.x.shape[0] == 40]
    assert any((inputs.topk_ids == 3).all() for inputs in full)  # an overloaded expert
    assert any((inputs.topk_ids == -1).all() for inputs in full)
    assert len(ROUTES) == 7


def swapped_planes(found):
    found["dw13"].copy_(torch.cat(found["dw13"].chunk(2, dim=1)[::-1], dim=1))


def other_expert(found):
    found["dw2"].copy_(found["dw2"].roll(1, 0))


def weight_twice(found):
    """In a third of the routes, as one wrong block would have it."""
    found["d_topk_weights"][::3] *= 0.5


def one_element(found):
    found["dx"][20, 5] += 1


def one_row_is_missing(found):
    found["dx"][3] = 0


def not_empty(found):
    found["dw13"][EMPTY] = 1e-3


def two_steps(found, steps=2):
    found["dgu"].view(torch.int16)[7, found["dgu"][7].flatten().abs().argmax()] += steps


def half_a_binade(found):
    two_steps(found, 64)


def a_row_is_not_zero(found):
    found["x_rows"][63] = 1.0


def an_expert_is_added_twice(into):
    into["w2"][4] += into["w2"][4] - 0.5


def a_tile_of_an_unsampled_expert(found):
    found["dw2"][4, 16:32] = found["dw2"][4, 32:48]


def a_row_of_gemm2(found):
    found["dx_rows"][258] = found["dx_rows"][259]


def of_another_grid(found):
    found["dw13"].view(torch.int16)[2, 3, 4] ^= 1


def of_weights_alone(found):
    found["dw2"].view(torch.int16)[2, 3, 4] ^= 1


def lost_partial(found):
    found["partials"][0, 9] = 0


EMPTY = 1  # no route goes to this expert
OF_STAGES = {two_steps, half_a_binade, a_row_is_not_zero, a_row_of_gemm2, lost_partial}
OF_ONE_LAUNCH = {an_expert_is_added_twice, of_another_grid, of_weights_alone}
# Faults at once, of which each has a line of its own.
ROUNDS = (
    {},
    {
        swapped_planes: "FAIL dw13 ", other_expert: "FAIL dw2 ", weight_twice: "FAIL d_topk_weights ",
        one_element: "FAIL dx ", two_steps: "FAIL dgu ", lost_partial: "FAIL partials ",
    },
    {
        one_row_is_missing: "FAIL dx ", not_empty: "dw13 is not zero where nothing was",
        a_tile_of_an_unsampled_expert: "dw2 of local expert 4, by products",
        a_row_of_gemm2: "dx_rows of local expert", a_row_is_not_zero: "x_rows: a row behind",
    },
    {
        an_expert_is_added_twice: "FAIL dw2_added",
        of_another_grid: "another grid: other bits of dw13",
        of_weights_alone: "weight gradients alone: other bits of dw2",
    },
)  # fmt: skip


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_rank_check_finds_faults_of_a_backward_kernel(precision, monkeypatch):
    """The emulated kernel is right; then its results, or what it leaves behind, are spoilt."""
    monkeypatch.setattr(oracle, "CHECKED_ELEMENTS", 1)  # two experts, by the oracle
    case = Case(shape("tiny"), precision, (40,))
    inputs = Case.inputs

    def without_one_expert(self, rank, device):
        drawn = inputs(self, rank, device)
        drawn.topk_ids.masked_fill_(drawn.topk_ids == EMPTY, -1)
        return drawn

    monkeypatch.setattr(Case, "inputs", without_one_expert)
    through, stages = backward.through_backend, backward.backward_stages
    args = Namespace(backend="emulate", verbose=False, repeat=2, fewer_sms=40)

    for faults in ROUNDS:
        if precision == "fp8":  # sums of e4m3 products tip by more than bf16's steps
            faults = {half_a_binade if f is two_steps else f: text for f, text in faults.items()}

        def spoilt(*given, faults=faults, **options):
            y, found, state = through(*given, **options)
            whole = all(found[name] is not None for name in ("dx", "dw13"))
            for fault in faults.keys() - OF_STAGES - OF_ONE_LAUNCH if whole else ():
                fault(found)
            if of_weights_alone in faults and found["dx"] is None:
                of_weights_alone(found)
            if of_another_grid in faults and given[0]._options["num_ctas"] == backward.OTHER_CTAS:
                of_another_grid(found)
            if an_expert_is_added_twice in faults and given[2:]:
                an_expert_is_added_twice(given[2])
            return y, found, state

        def left(*given, faults=faults):
            found = stages(*given)
            for fault in faults.keys() & OF_STAGES:
                fault(found)
            return found

        monkeypatch.setattr(backward, "through_backend", spoilt)
        monkeypatch.setattr(backward, "backward_stages", left)
        checker = backward.check_backward(case, Rank(0, 1, torch.device("cpu")), args)
        assert checker.good == (not faults), checker.lines
        for fault, text in faults.items():
            assert any(text in line for line in checker.lines), (fault, checker.lines)


@pytest.fixture
def small(alone):
    """Return four steps of a small model, by the oracle."""
    model = ModelConfig(hidden=32, intermediate=32, num_heads=2, context=16)
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8)
    here = (Recipe(model, batch=2, steps=4), text, torch.device("cpu"), alone)
    return Setup(*here, {"backend": "reference", "precision": "bf16"})


def test_a_run_of_curves_that_is_cut_leaves_those_before_it(small, tmp_path, monkeypatch):
    done = []

    def cut(*given):
        if done:
            raise TimeoutError
        done.append(train(*given))
        return done[0]

    monkeypatch.setattr(curves, "train", cut)
    with pytest.raises(TimeoutError):
        compare_curves(small, [1, 2], tmp_path / "curves.png", print)
    assert [path.name for path in tmp_path.iterdir()] == ["curves.csv"]
    assert read(tmp_path / "curves.csv")[1] == {("reference", "bf16", 1): done[0].losses}


def test_a_table_that_is_cut_leaves_the_one_before_it(tmp_path):
    def rows():
        yield [1]
        raise KeyboardInterrupt

    write_table(tmp_path / "table.csv", "# whole", [[7]], ["n"])
    with pytest.raises(KeyboardInterrupt):
        write_table(tmp_path / "table.csv", "# cut", rows(), ["n"])
    assert (tmp_path / "table.csv").read_text().split() == ["#", "whole", "n", "7"]


def test_curves_of_three_runs_are_drawn_and_judged(small, tmp_path, capsys):
    picture = tmp_path / "curves.png"
    good, found = compare_curves(small, [1, 2], picture, print)
    assert list(found) == runs("reference", [1, 2])
    assert [len(losses) for losses in found.values()] == [4] * 6
    assert picture.exists() == (find_spec("matplotlib") is not None)
    title, again = read(tmp_path / "curves.csv")
    assert again == found
    said = capsys.readouterr().out
    assert good
    assert re.search(
        r"PASS: reference fp8: .* from reference bf16, standard error \d+\.\d\d%", said
    )
    one, other = (found["reference", "bf16", seed] for seed in (1, 2))
    assert one != other
    assert one[0] == pytest.approx(found["reference", "fp8", 1][0], rel=1e-2)
    assert train(small, "again").losses == one

    apart = {key: [1.006 * loss for loss in losses] if key[1] == "fp8" else losses
             for key, losses in found.items()}  # fmt: skip
    assert not summarize(apart, print)
    assert "FAIL: reference fp8" in capsys.readouterr().out
    below = {key: [0.98 * loss for loss in losses] if key[1] == "fp8" else losses
             for key, losses in found.items()}  # fmt: skip
    assert not summarize(below, print)
    apart["reference", "fp8", 1] = [float("nan")]
    assert not summarize(apart, print)


def test_gradients_of_y_are_not_the_inputs():
    """As they were where two seeds had 32 bits in common."""
    case, cpu = Case(shape("tiny"), "bf16", (40, 40)), torch.device("cpu")
    drawn = [case.inputs(0, cpu).x, case.inputs(1, cpu).x, case.dy(0, cpu), case.dy(1, cpu)]
    for i, a in enumerate(drawn):
        assert not any(torch.equal(a[0], b[0]) for b in drawn[i + 1 :])


@pytest.mark.parametrize("passes", [1, 2])
def test_gradients_added_to_fp32_are_those_stored(passes):
    """What two passes round may cancel: an element's own size says nothing then. A wrong scale is found in both."""
    generator = torch.Generator().manual_seed(1)
    parts = [torch.randn(3, 40, 24, generator=generator) for _ in range(passes)]
    stored = torch.zeros(3, 40, 24, dtype=torch.bfloat16)
    for part in parts:
        stored = (stored.float() + part).bfloat16()
    for scale, good in ((1.0, True), (1.02, False)):
        checker = GradientChecker(Problem(32, 48, 3, 1))
        checker.compare_added("dw13", scale * sum(parts), stored.float(), passes)
        assert checker.good == good, checker.lines


def test_a_limit_for_means_needs_values_that_are_rounded_one_by_one():
    """One row's weight gradient has as many roundings as its h has values, however many elements they move."""
    want = torch.ones(1, 64, 16)
    for roundings, good in ((None, False), (256, False), (16, True)):
        checker = GradientChecker(Problem(64, 16, 1, 1, precision="fp8"))
        checker.compare_fp32("dw2", 1.12 * want, want, roundings)
        assert checker.good == good, checker.lines
