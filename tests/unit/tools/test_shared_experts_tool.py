"""tools/shared_experts.py: the shared expert inside and beside agree, and a fault is told."""

from programs import run_code

TINY = ("--shape", "tiny", "--tokens", "24", "3", "--samples", "1", "--backend", "staged")


def test_inside_and_beside_agree_and_a_fault_is_told():
    out = run_code(f"""
import sys, shared_experts
from megamoe import SharedExperts
def main(*more):
    sys.argv = ["shared_experts.py", *{TINY!r}, *more]
    print("exit code", shared_experts.main(), flush=True)
main("--ranks", "2", "--shared", "96")
routes = SharedExperts.routes
def louder(self, ids, scores):
    ids, weights = routes(self, ids, scores)
    return ids, weights * 1.3
SharedExperts.routes = louder
main("--ranks", "1", "--precision", "fp8")
""")
    good, bad = out.split("exit code 0")
    rows = [line[2:26].strip() for line in good.splitlines()[2:6]]
    assert rows == ["routed alone", "beside, layer bf16", "beside, torch bf16", "inside"]
    assert "tiny, 2 x 48 shared, T = 3, us" in good
    assert "exit code 1" in bad
