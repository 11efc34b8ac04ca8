"""tools/compare_trees.py: the sweeps of two trees in turns, matched row by row."""

import argparse
import csv
import os
import statistics
import subprocess
import sys
from pathlib import Path

from bench.tree import ROOT, tree_hash

SWEEP = "tools/latency_sweep.py"
KEYS = ("shape", "precision", "ranks", "tokens", "mode", "direction", "gradients", "backend")
OLDER = {
    "direction": "forward",
    "routing": "uniform",
}  # what tables have that were written before the column was
Row = tuple[str, ...]


def read_table(path: Path) -> dict[Row, float]:
    """Return the rows of a sweep's CSV -> us. Raises SystemExit for two rows of one name."""
    with path.open() as file:
        file.readline()  # when, where and how
        found: dict[Row, float] = {}
        for row in csv.DictReader(file):
            key = (*(row.get(k, OLDER.get(k, "")) for k in (*KEYS, "reserve_sms", "routing")),)
            if key in found:
                raise SystemExit(f"{path}: two rows are {' '.join(key)}")
            found[key] = float(row["us"])
    return found


def run_sweep(tree: Path, name: str, out: Path, arguments: list[str]) -> dict[Row, float]:
    """Run the sweep of a tree; raises SystemExit with the end of its output where it fails."""
    command = [sys.executable, str(tree / SWEEP), *arguments]
    command += ["--out", str(out), "--name", name]
    path = os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return read_table(out / f"{name}.csv")


def median_of(tables: list[dict[Row, float]], key: Row) -> float:
    return statistics.median(table[key] for table in tables)


def compare(args: argparse.Namespace) -> int:
    """Run both trees in turns; print and write the comparison."""
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    trees = {"base": args.base.resolve(), "here": ROOT}
    tables: dict[str, list[dict[Row, float]]] = {name: [] for name in trees}
    for turn in range(args.rounds):
        for name, tree in trees.items():
            tables[name].append(run_sweep(tree, f"{name}-{turn + 1}", out, args.sweep))
    keys = [k for k in tables["here"][0] if k in tables["base"][0]]
    lines = [(k, median_of(tables["base"], k), median_of(tables["here"], k)) for k in keys]
    print(f"{'':44}{'base us':>10}{'here us':>10}{'change':>9}")
    for key, base, here in lines:
        print(f"{' '.join(filter(None, key)):44}{base:10.1f}{here:10.1f}{here / base - 1:9.1%}")
    with (out / "compare.csv").open("w", newline="") as file:
        file.write("# " + ", ".join(f"{n}: tree {tree_hash(t)}" for n, t in trees.items()) + "\n")
        writer = csv.writer(file)
        writer.writerow((*KEYS, "reserve_sms", "routing", "base_us", "here_us"))
        writer.writerows((*key, base, here) for key, base, here in lines)
    return 0
