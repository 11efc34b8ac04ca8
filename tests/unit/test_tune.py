"""tools/tune.py: what it calls the best choice, and where it does not run."""

from programs import run, run_code


def test_the_formula_is_held_against_the_best():
    out = run_code("""
from tune import Choice, over_best
of = lambda blocks, us: Choice("dsv3", "fp8", "forward", 1, 8, blocks, us)
print(over_best([of(0, 110.0), of(16, 120.0), of(32, 100.0)]))
print(over_best([of(0, 90.0), of(16, 120.0)]))
""")
    first, second = out.splitlines()
    assert "step_blocks=32" in first
    assert "0.1000" in first
    assert "step_blocks=0" in second
    assert second.endswith("0.0)")


def test_without_a_gpu_there_is_nothing_to_tune():
    done = run("tune.py")
    assert done.returncode == 2
    assert "needs Hopper GPUs" in done.stderr
