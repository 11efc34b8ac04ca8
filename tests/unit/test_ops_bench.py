"""tools/ops_bench.py: its contenders compute the same thing, and where it does not run."""

from test_tools import run, run_code


def test_contenders_agree():
    out = run_code("""
import argparse, torch, ops_bench
from megamoe.testing.compare import compare
ops_bench.DEVICE = "cpu"
torch.manual_seed(0)
args = argparse.Namespace(experts_of_family=2, rows=24, k=64, n=32, experts=3, tokens=20, size=32,
                          no_bias=False, compile=False)
def flat(found):
    found = found if isinstance(found, (tuple, list)) else (found,)
    return [t.flatten(1) for t in found if t.dim() > 1]
for make in ops_bench.CASES.values():
    for case in make(args):
        ours, theirs = (flat(case.calls[name]()) for name in ("megamoe", "torch"))
        worst = max(compare(a, b).relative for a, b in zip(ours, theirs))
        assert worst < 2e-2, (case.name, worst)
        print(case.name, case.flops)
""")
    names = [line.rsplit(" ", 1)[0] for line in out.splitlines()]
    family = [n + a for a in ("swiglu", "geglu", "srelu") for n in ("", "d")]
    assert names == [*family, "wgrad", "gpt-oss forward", "gpt-oss step"]


def test_without_a_gpu_there_is_nothing_to_time():
    done = run("ops_bench.py", "--only", "swiglu")
    assert done.returncode == 2
    assert "needs a Hopper GPU" in done.stderr
