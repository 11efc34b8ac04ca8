"""Plant bugs in Python, one at a time, and see whether tests notice: `python tests/mutants.py --seed 44 --number 40`.

The seed draws them from all of megamoe/ and jit/, before anybody reads a test: an operator, a constant, an argument or
a call of a function becomes another. Each is planted in a copy of the tree. Files of tests that name the function or
its module run first, then all tests of its room and of the rooms that use it, until one fails. A mutant that survives
is equivalent, or a test is missing. `make libraries` has the tests of most adapters.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHON = ROOT / ".venv" / "bin" / "python"
# Tests of a room, then of those that see it.
SEEN_IN = {
    "core": "core formats launch backends",
    "formats": "formats launch layer backends emulate",
    "group": "group backends nn",
    "jit": "jit launch",
    "launch": "launch backends layer emulate",
    "window": "window launch backends",
    "backends": "backends launch layer group emulate",
    "ops": "ops emulate",
    "experts": "experts nn layer",
    "layer": "layer nn experts group",
    "nn": "nn layer experts tools",
    "adapters": "adapters",
    "checkpoints": "checkpoints adapters",
}
OPPOSITE = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Add: ast.Sub, ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.And: ast.Or, ast.Or: ast.And, ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip


ORDERLESS = {"max", "min", "isinstance", "gcd"}


def mistakes(node: ast.AST):
    """Yield what a node may be by mistake."""
    other = copy.deepcopy(node)
    if isinstance(node, ast.Call) and getattr(node.func, "id", None) in ORDERLESS:
        return
    if isinstance(node, ast.Compare) and type(node.ops[0]) in OPPOSITE:
        other.ops[0] = OPPOSITE[type(node.ops[0])]()
        yield other
    elif isinstance(node, (ast.BinOp, ast.BoolOp)) and type(node.op) in OPPOSITE:
        other.op = OPPOSITE[type(node.op)]()
        yield other
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield ast.Constant(node.value + 1)
    elif isinstance(node, ast.IfExp):
        other.body, other.orelse = node.orelse, node.body
        yield other
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield ast.Pass()
    elif isinstance(node, ast.Tuple) and len(node.elts) == 2:
        other.elts.reverse()
        yield other
    elif isinstance(node, ast.Call) and node.keywords and node.keywords[-1].arg:
        other.keywords.pop()
        yield other
    elif (
        isinstance(node, ast.Call)
        and len(node.args) > 1
        and not isinstance(node.args[1], ast.Starred)
    ):
        other.args[:2] = other.args[1::-1]
        yield other


def code_of(function: ast.AST):
    """Yield a function's nodes, but for annotations and what an error says."""
    for field, value in ast.iter_fields(function):
        if field in ("annotation", "returns", "decorator_list"):
            continue
        for node in value if isinstance(value, list) else [value]:
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "isinstance":
                continue
            if isinstance(node, ast.AST) and not isinstance(node, (ast.Raise, ast.JoinedStr)):
                yield node
                yield from code_of(node)


def places():
    """Return file -> function -> its nodes that may be others."""
    found = {}
    for folder in ("megamoe", "jit"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            room = path.relative_to(ROOT).parts[1] if folder == "megamoe" else "jit"
            if room not in SEEN_IN:
                continue
            for function in ast.walk(ast.parse(path.read_text())):
                if isinstance(function, ast.FunctionDef):
                    nodes = [
                        n
                        for n in code_of(function)
                        if hasattr(n, "end_lineno") and list(mistakes(n))
                    ]
                    if nodes:
                        found[path, function.name, function.lineno] = room, nodes
    return found


def planted(text: str, node: ast.AST) -> str:
    lines = text.encode().splitlines(keepends=True)
    begin = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
    (other,) = mistakes(node)
    new = ast.unparse(ast.fix_missing_locations(other))
    new = (
        f"({new})"
        if isinstance(node, ast.expr) and not isinstance(node, (ast.Constant, ast.Call))
        else new
    )
    return (text.encode()[:begin] + new.encode() + text.encode()[end:]).decode()


def stages(tree: Path, room: str, path: Path, function: str):
    """Yield what pytest runs: first the files that name what changed, then all of each room."""
    tests = tree / "tests"
    rooms = [
        tests / name if name == "emulate" else tests / "unit" / name
        for name in SEEN_IN[room].split()
    ]
    *_, package, module = path.with_suffix("").parts
    names = re.compile(rf"\b({function}|{package}\.{module}|{package} import .*{module})\b")
    files = [file for folder in rooms for file in sorted(folder.glob("test_*.py"))]
    if near := [file for file in files if names.search(file.read_text())]:
        yield near
    yield from ([folder] for folder in rooms)


def verdict(tree: Path, room: str, path: Path, function: str, seconds: float) -> str:
    """Return the first test that failed, or how the tests ended without."""
    environment = os.environ | {"PYTHONPATH": str(tree), "CUDA_VISIBLE_DEVICES": ""}
    deadline = time.monotonic() + seconds
    for tests in stages(tree, room, path, function):
        command = [PYTHON, "-m", "pytest", "-q", "-x", "-n", "2", *tests]
        try:
            left = max(1.0, deadline - time.monotonic())
            run = subprocess.run(
                command, cwd=tree, env=environment, capture_output=True, text=True, timeout=left
            )
        except subprocess.TimeoutExpired:
            return f"NO ANSWER in {seconds:g} s, in {tests[0].name}"
        if run.returncode:
            failed = [
                line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))
            ]
            return f"seen: {failed[0] if failed else f'pytest ended with {run.returncode}'}"
    return "SURVIVED"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=44)
    parser.add_argument("--number", type=int, default=40)
    parser.add_argument(
        "--first", type=int, default=0, help="of the drawn ones; those before are skipped"
    )
    parser.add_argument("--seconds", type=float, default=600, help="for the tests of one")
    parser.add_argument("--list", action="store_true", help="draw them only")
    options = parser.parse_args()
    found, dice = places(), random.Random(options.seed)
    functions = dice.choices(
        list(found), weights=[len(nodes) for _, nodes in found.values()], k=options.number
    )
    drawn = [(where, found[where][0], dice.choice(found[where][1])) for where in functions]
    counts: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        subprocess.run(
            ["git", "-C", ROOT, "worktree", "add", "-q", "--detach", tree, "HEAD"], check=True
        )
        try:
            for number, ((path, function, _), room, node) in list(enumerate(drawn))[
                options.first :
            ]:
                text, (other,) = path.read_text(), mistakes(node)
                place = f"{path.relative_to(ROOT)}:{node.lineno} {function}()"
                print(
                    f"{number} {place}\n    {ast.unparse(node)}\n    {ast.unparse(other)}",
                    flush=True,
                )
                if options.list:
                    continue
                copied = tree / path.relative_to(ROOT)
                copied.write_text(planted(text, node))
                begin = time.monotonic()
                said = verdict(tree, room, path.relative_to(ROOT), function, options.seconds)
                copied.write_text(text)
                counts[said.partition(":")[0]] = counts.get(said.partition(":")[0], 0) + 1
                print(f"    {said} ({time.monotonic() - begin:.0f} s)", flush=True)
        finally:
            subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", tree], check=True)
    print(counts)


if __name__ == "__main__":
    sys.exit(main())
