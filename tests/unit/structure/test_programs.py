"""programs.py: what it starts ends, prints and imports as under a new python; the tests' own torch has one thread."""

import pytest
import torch
from programs import run_code, start


def test_torch_has_one_thread():
    """Two of them on a machine that others use wait for each other in loops."""
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize(
    ("code", "returncode", "said"),
    [
        ("print('out')", 0, ""),
        ("print('out'); raise SystemExit(3)", 3, ""),
        ("print('out'); raise SystemExit('no such shape')", 1, "no such shape\n"),
        ("print('out'); 1 / 0", 1, "ZeroDivisionError"),
        ("import os; print('out', flush=True); os.abort()", -6, ""),
    ],
)
def test_how_a_program_ends(code, returncode, said):
    done = start(["-c"], code)
    assert (done.returncode, done.stdout) == (returncode, "out\n")
    assert said in done.stderr


def test_what_a_program_sees(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import math; math.planted = 7")
    code = "import os, sys, math; print(sys.argv, math.planted, os.environ['COLOUR'], sys.path[0])"
    done = start(["tool", 5], code, [tmp_path], COLOUR="blue")
    assert done.stdout == f"['tool', '5'] 7 blue {tmp_path}\n", done.stderr
    assert "planted" not in run_code("import math; print(dir(math))")
