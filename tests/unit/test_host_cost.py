"""tools/host_cost.py: it prints its table, and its limits can be exceeded."""

import re

from programs import run, run_code

WAYS = ("module", "Layer", "operator", "backend", "torch")


def test_table():
    done = run("host_cost.py", "--precision", "bf16", "--repeats", 3, "--backend", "nothing")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"bf16, nothing: (\w+) +(\d+\.\d) / (\d+\.\d)", done.stdout)
    assert [row[0] for row in rows] == list(WAYS)
    assert all(0 < float(least) <= float(median) for _, least, median in rows)


def test_a_slow_backend_is_over_the_limit():
    code = """
import sys, time, host_cost
forward = host_cost.Nothing.forward
def slow(self, *args, **options):
    time.sleep(1e-4)
    return forward(self, *args, **options)
host_cost.Nothing.forward = slow
sys.modules["host_cost"] = host_cost
sys.argv = ["host_cost.py", "--precision", "bf16", "--repeats", "2", "--check", "--backend", "nothing"]
print("exit code", host_cost.main())
"""
    out = run_code(code)
    assert "exit code 1" in out
    for way in ("module", "backend"):
        assert f"over the limit: bf16 {way} no_grad" in out
