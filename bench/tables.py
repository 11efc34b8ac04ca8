"""Tables: of measurements, as a CSV below a line of what was run; of documents, in Markdown."""

import csv
import datetime
import os
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from bench.tree import ROOT, tree_hash
from megamoe.core.table import PRECISIONS

PRINTED = ("table", "case", "of", "value")  # columns of docs/measurements/printed.csv
WIDTH = max(map(len, PRECISIONS)) + 2  # of a column of precisions


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of Markdown."""
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(c.strip() for c in cells) + " |" for cells in lines).replace(
        "| --- ", "|---"
    )


def header() -> str:
    """Return what a measurement needs beside it: date, device, versions, commit, hash of the tree, command."""
    driver = ""
    if torch.cuda.is_available():
        device = f"{torch.cuda.device_count()}x {torch.cuda.get_device_name(0)}"
        query = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        driver = f", driver {query.splitlines()[0] if query else 'unknown'}"
    else:
        device = f"CPU ({os.cpu_count()} cores)"
    commit = _output("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD") or "unknown"
    if _output("git", "-C", str(ROOT), "status", "--porcelain"):
        commit += "+changes"
    command = shlex.join(["python", *sys.argv]) if sys.argv[0] else "python"
    today = datetime.date.today().isoformat()
    versions = f"torch {torch.__version__}, commit {commit}, tree {tree_hash(ROOT)}"
    return f"# {today}, {device}{driver}, {versions}: {command}"


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def write_table(path: Path, title: str, rows: Iterable[Any], columns: Sequence[str] = ()) -> None:
    """Write rows below their title as a CSV, and make its folder. rows: of one dataclass, or cells of these columns.

    A reader, or one who comes after a kill, finds the table from before or the whole new one.
    """
    if not columns:
        rows = list(rows)
        columns = [field.name for field in fields(rows[0])]
        rows = [[getattr(row, name) for name in columns] for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.unfinished")
    with unfinished.open("w", newline="") as file:
        file.write(title + "\n")
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)
    unfinished.replace(path)
