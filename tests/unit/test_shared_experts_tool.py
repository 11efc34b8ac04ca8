"""tools/shared_experts.py: the shared expert inside and beside agree, and a fault is told."""

from test_tools import run, run_code

TINY = ("--shape", "tiny", "--tokens", "24", "3", "--samples", "1", "--backend", "staged")


def test_inside_and_beside_agree():
    done = run("shared_experts.py", *TINY, "--ranks", "2", "--shared", "96")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line[2:26].strip() for line in done.stdout.splitlines()[2:6]]
    assert rows == ["routed alone", "beside, layer bf16", "beside, torch bf16", "inside"]
    assert "tiny, 2 x 48 shared, T = 3, us" in done.stdout


def test_a_fault_inside_is_told():
    out = run_code(f"""
import sys, shared_experts
routes = shared_experts.SharedExperts.routes
def twice(self, ids, scores):
    ids, weights = routes(self, ids, scores)
    return ids, weights * 1.3
shared_experts.SharedExperts.routes = twice
sys.argv = ["shared_experts.py", *{TINY!r}, "--ranks", "1", "--precision", "fp8"]
print("exit code", shared_experts.main())
""")
    assert "exit code 1" in out
