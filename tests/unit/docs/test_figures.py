"""Measured figures stand in tables that bench/figures.py makes from the CSVs of docs/measurements/.

Elsewhere a page states a figure of time, memory or speed only if `STATED` has it. Tolerances are no figures here.
"""

import json
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import torch

from bench import documents, figures, floors, plot
from megamoe.core.config import Problem
from megamoe.nn.report import memory_report
from megamoe.testing.shapes import SHAPES

ROOT = Path(__file__).resolve().parents[3]
LOGS = {"api", "decisions", "tuning"}  # a reference, and records with dates and commits
PAGES = [
    "README.md",
    *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md") if p.stem not in LOGS),
]
UNITS = r"(?: ?(?:us|ms|GHz|GB|TFLOPS|nats|tokens/s|%)|x| times)"
MEASURED = re.compile(rf"(?<![\w.])\d[\d.,]*(?: ?(?:to|and|-) ?\d[\d.,]*)?{UNITS}(?![\w/])")
GENERATED = re.compile(
    r"<!-- ([\w-]+): begin.*?<!-- \1: end -->|^```.*?^```$", re.MULTILINE | re.DOTALL
)
PARTS = [(page, name) for page, parts in figures.PARTS.items() for name in parts]
MADE = r"us$|_fp32$|loss|seconds|value|^layer$|^launches$|dram_"  # columns of figures
COMPUTED = {"models", "traffic", "plan"}  # of shapes, without a CSV


def state_gb(shape, tokens):
    s = SHAPES[shape]
    sizes = s.hidden, s.intermediate, s.num_experts, s.top_k
    problem = Problem(*sizes, ep_size=4, max_tokens=tokens)
    return memory_report(problem)["train_state_bytes"] / 1e9


def gelus_apart():
    """Return how far the two forms of gelu are apart at -4, in percent."""
    x = torch.tensor(-4.0, dtype=torch.float64)
    exact, tanh = (torch.nn.functional.gelu(x, approximate=form) for form in ("none", "tanh"))
    return 100 * (1 - tanh / exact).item()


# page -> figures outside of tables: what they should be, or why nothing recomputes them
STATED = {
    "docs/measurements.md": {
        "0.8 ms": "of bench/timing.py",
        "1300 TFLOPS": lambda: floors.GEMM_TFLOPS["fp8"],
        "3 to 5 %": "of repeated runs",
        "3 %": "a rule",
        "2.4 to 3.2 us": "printed by tools/host_cost.py --captured",
    },
    "docs/fp4.md": {"229 GB": lambda: 36 * 128 * 3 * 2880**2 * 2 / 1e9},
    "docs/numerics.md": {"45 %": gelus_apart},
    "docs/training.md": {
        "0.58 GB": lambda: state_gb("dsv3", 4096),
        "0.37 GB": lambda: state_gb("qwen3-30b", 8192),
        "10 ms": "docs/decisions.md, 0017",
    },
}


def stated(text):
    """Return the figures of a page outside of what is generated, and of programs."""
    return [m[0] for m in MEASURED.finditer(GENERATED.sub("", text))]


def agrees(figure, value):
    """Whether a figure is the value, rounded to the figure's own digits."""
    number = figure.split()[0]
    return abs(float(number) - value) <= 0.5 * 10.0 ** -len(number.partition(".")[2]) * (1 + 1e-9)


@pytest.mark.parametrize("page", PAGES)
def test_figures_outside_of_tables_are_few_and_right(page):
    wanted = STATED.get(page, {})
    assert set(stated((ROOT / page).read_text())) == set(wanted)
    for figure, value in wanted.items():
        assert isinstance(value, str) or agrees(figure, value())


def test_a_figure_outside_of_tables_is_seen():
    text = "It takes 1.3 ms, or 20 to 30 % less: 1.2x, 2.7-5.7x, 1.2 times; 128 x 128, 4x4.\n```\n9 us\n```\n"
    found = ["1.3 ms", "20 to 30 %", "1.2x", "2.7-5.7x", "1.2 times"]
    assert stated(f"{text}<!-- a-b: begin -->\n3 us\n<!-- a-b: end -->\n") == found
    assert agrees("0.58 GB", 0.584)
    assert not agrees("0.58 GB", 0.586)


def changed_lines(rows):
    """Return the lines of a CSV with other figures: two to four times as large."""
    changed = []
    for i, row in enumerate(rows):
        keys = [k for k in row if re.search(MADE, k)]
        factor = 2 + i % 3
        changed.append({**row, **{k: str(factor * float(row[k])) for k in keys if row[k]}})
    return changed


@pytest.mark.parametrize(("page", "name"), [p for p in PARTS if p[1] not in COMPUTED])
def test_a_table_is_of_its_file(page, name, monkeypatch):
    """test_docs.py compares it with the page; here another file gives another table: none is written by hand."""
    before, read = figures.PARTS[page][name](), figures.lines
    monkeypatch.setattr(figures, "lines", cache(lambda file: changed_lines(read(file))))
    cells = [re.findall(r"(?<=\| )[\d.,]+", t) for t in (before, figures.PARTS[page][name]())]
    assert len(cells[0]) == len(cells[1]) > 0
    assert cells[0] != cells[1]


def test_a_case_that_was_not_measured_is_no_empty_cell():
    with pytest.raises(LookupError, match="has no us where"):
        figures.mean(figures.EP4, name="dsv3", tokens=7)


def test_every_file_is_behind_a_table(monkeypatch):
    """What no table reads is a log: it belongs under a tag. Few files, and small ones."""
    files = {p.name: p.stat().st_size for p in figures.MEASUREMENTS.iterdir()}
    read, original = Counter(), figures.lines
    monkeypatch.setattr(figures, "lines", lambda name: (read.update([name]), original(name))[1])
    for page, name in PARTS:
        figures.PARTS[page][name]()
    assert {*read, documents.PICTURE.name} == set(files)
    assert len(files) <= 16
    assert sum(files.values()) <= 300_000
    pages = "".join((ROOT / page).read_text() for page in PAGES)
    assert not [name for name in files if name not in pages]


def test_the_picture_shows_the_files_figures(tmp_path, monkeypatch, capsys):
    bars = figures.speedups()
    assert plot.figures_in(documents.PICTURE) == json.loads(json.dumps(bars))
    stale = tmp_path / "speedup.png"
    stale.write_bytes(documents.PICTURE.read_bytes().replace(b"1.88", b"1.98"))
    monkeypatch.setattr(documents, "PICTURE", stale)
    assert documents.write([], check=True) == 1
    assert "stale" in capsys.readouterr().out
