"""tools/compare_trees.py: two trees take turns, rows are matched by name, the median of the rounds is printed."""

import csv
import shutil
import textwrap

from programs import ROOT, passes, run

from bench.tree import tree_hash

FAKE = """
    import pathlib, sys
    options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
    out, name = pathlib.Path(options["--out"]), options["--name"]
    us = {us}[int(name[-1]) - 1]
    columns = "shape,precision,ranks,tokens,mode,backend,us,direction,gradients,reserve_sms"
    rows = [f"{{options['--shape']}},fp8,1,{{t}},cool,mega,{{us * t}},forward,," for t in (8, 64)]
    out.joinpath(name + ".csv").write_text("\\n".join(["# a title", columns, *rows]) + "\\n")
"""


def tree(folder, us):
    (folder / "tools").mkdir(parents=True)
    (folder / "tools" / "latency_sweep.py").write_text(textwrap.dedent(FAKE.format(us=us)))
    return folder


def test_medians_of_the_rounds_are_compared(tmp_path):
    base, here = tree(tmp_path / "base", [1.0, 9.0, 2.0]), tree(tmp_path / "here", [1.0, 1.0, 5.0])
    for name in ("compare_trees.py", "command.py"):
        shutil.copy(ROOT / "tools" / name, here / "tools")
    shutil.copytree(ROOT / "bench", here / "bench", ignore=shutil.ignore_patterns("__pycache__"))
    options = ("--base", base, "--rounds", 3, "--out", tmp_path / "out", "--", "--shape", "dsv3")
    said = passes(here / "tools" / "compare_trees.py", *options)
    lines = [line.split() for line in said.splitlines()[1:]]
    assert [line[-3:] for line in lines] == [["16.0", "8.0", "-50.0%"], ["128.0", "64.0", "-50.0%"]]
    with (tmp_path / "out" / "compare.csv").open() as file:
        title, rows = file.readline(), list(csv.DictReader(file))
    assert title == f"# base: tree {tree_hash(base)}, here: tree {tree_hash(here)}\n"
    assert [(r["tokens"], r["base_us"], r["here_us"]) for r in rows] == [
        ("8", "16.0", "8.0"),
        ("64", "128.0", "64.0"),
    ]


def test_a_failing_sweep_and_a_folder_that_is_no_tree_are_told(tmp_path):
    base = tree(tmp_path / "base", [1.0])
    (base / "tools" / "latency_sweep.py").write_text("raise SystemExit('no such shape')")
    done = run("compare_trees.py", "--base", base, "--out", tmp_path, "--", "--shape", "dsv3")
    assert done.returncode == 1
    assert "no such shape" in done.stderr
    done = run("compare_trees.py", "--base", tmp_path, "--", "--shape", "dsv3")
    assert done.returncode == 2
    assert "no tree with tools/latency_sweep.py" in done.stderr
