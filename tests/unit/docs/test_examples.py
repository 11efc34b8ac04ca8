"""Every program of examples/ runs as its docstring says, prints what it promises, and stays short."""

import os
import re

import pytest
from programs import ROOT, start, torchrun

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MAX_LINES = 60


def printed(name, **variables):
    """Run an example on a CPU, in one process; return what it printed."""
    done = start([ROOT / "examples" / name], **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(text):
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", text)]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
def test_an_example_is_short_and_says_how_to_run_it(path):
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_LINES
    command = r"(?:python|torchrun --nproc-per-node \d)"
    assert re.search(rf"^ *{command} examples/{path.name}", text.split('"""')[1], re.MULTILINE)


def test_every_example_is_run_here():
    names = {"cuda_graph.py", "fsdp2.py", "layer.py", "operators.py", "transformers_moe.py"}
    assert {path.name for path in EXAMPLES} == names


def test_layer():
    text = printed("layer.py")
    first, *_, last = losses(text)
    assert last < first / 4
    tokens = re.search(r"tokens per expert: \[(.*)\]", text)[1]
    assert sum(map(int, tokens.split(","))) == 256 * 2


def test_fsdp2_trains_on_two_ranks_and_resumes_on_one(tmp_path):
    program, checkpoint = ROOT / "examples" / "fsdp2.py", tmp_path / "checkpoint"
    runs = [torchrun(ranks, [program, checkpoint]) for ranks in (2, 1)]
    assert all(done.returncode == 0 for run in runs for done in run), runs
    first, resumed = ("".join(done.stdout for done in run) for run in runs)
    assert first.startswith("2 ranks, step 10: ")
    assert resumed.startswith("1 ranks, step 20: ")
    assert losses(resumed)[0] < 0.4 * losses(first)[0]  # 0.52 of it without the checkpoint


def test_transformers_moe():
    pytest.importorskip("transformers", minversion="5.20")
    text = printed("transformers_moe.py")
    first, *_, last = losses(text)
    assert last < first / 10
    generated = [int(t) for t in re.search(r"generated: \[(.*)\]", text)[1].split(",")]
    assert len(generated) == 12
    steps = [b - a for a, b in zip(generated[:-1], generated[1:], strict=True)]
    assert steps.count(1) >= 8  # it has learned to count
    assert "2 layers ran with megamoe" in text


def test_operators():
    text = printed("operators.py")
    bf16, fp8 = (float(e) for e in re.findall(r"relative error ([\d.]+)", text))
    assert 0 < bf16 < 0.01 < fp8 < 0.1
    gradients = [float(g) for g in re.findall(r"w_\w+ ([\d.]+)", text)]
    assert len(gradients) == 2
    assert min(gradients) > 0


def test_cuda_graph_without_a_gpu():
    done = start([ROOT / "examples" / "cuda_graph.py"])
    assert done.returncode == 1
    assert "needs a GPU" in done.stderr


@pytest.mark.gpu
def test_cuda_graph():
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    text = printed("cuda_graph.py", CUDA_VISIBLE_DEVICES=devices)
    assert re.findall(r"(\d+) tokens: equal to an eager call: True", text) == ["1", "17", "64"]
