"""tools/host_cost.py: it prints its table, and its limits can be exceeded."""

import re

from programs import passes, run_code

WAYS = ("module", "Layer", "operator", "backend", "torch")


def test_table():
    said = passes("host_cost.py", "--precision", "bf16", "--repeats", 3, "--backend", "nothing")
    rows = re.findall(r"bf16, nothing: (\w+) +(\d+\.\d) / (\d+\.\d)", said)
    assert [row[0] for row in rows] == list(WAYS)
    assert all(0 < float(least) <= float(median) for _, least, median in rows)


def test_figures_are_of_a_clock_that_calls_move():
    """The module takes 9, 5, 1 and 7 us a call: least of the repeats' means 1, median 6; the limit is the least's."""
    code = """
import itertools, sys, time, torch
from bench import host_cost
from bench.timing import Timer
now, calls = [0.0], itertools.count()
def forward(self, call, keep=False):
    run = (next(calls) - host_cost.WARM_UP) // host_cost.CALLS % 4
    now[0] += (9e-6, 5e-6, 1e-6, 7e-6)[run]
    return call.x, call.x.new_empty(0, dtype=torch.uint8)
host_cost.Nothing.forward = forward
time.perf_counter = lambda: now[0]
real = Timer.host
def host(*arguments):
    global calls
    calls = itertools.count()
    return real(*arguments)
Timer.host = host
sys.argv = ["host_cost.py", "--precision", "bf16", "--repeats", "4", "--backend", "nothing"]
import host_cost as command
print(command.main())
"""
    rows = re.findall(r"bf16, nothing: (\w+) +(\S+) / (\S+)", run_code(code))
    assert {way: (least, median) for way, least, median in rows} == {
        **dict.fromkeys(WAYS[:4], ("1.0", "6.0")),
        "torch": ("0.0", "0.0"),
    }


def test_a_slow_backend_is_over_the_limit():
    code = """
import sys, time
from bench import host_cost
forward = host_cost.Nothing.forward
def slow(self, call, keep=False):
    time.sleep(1e-4)
    return forward(self, call, keep)
host_cost.Nothing.forward = slow
sys.argv = ["host_cost.py", "--precision", "bf16", "--repeats", "2", "--check", "--backend", "nothing"]
import host_cost as command
print("exit code", command.main())
"""
    out = run_code(code)
    assert "exit code 1" in out
    for way, mode in (("module", "no_grad"), ("module", "grad"), ("backend", "inference_mode")):
        assert f"over the limit: bf16 {way} {mode}" in out
