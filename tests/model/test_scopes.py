"""Additions exist at gpu scope only: asking for another does not compile, on any machine and in the model checker."""

import subprocess
from functools import partial
from pathlib import Path

import pytest

from megamoe import jit
from megamoe.core.errors import CompileError
from megamoe.jit import host, paths

MODEL = Path(__file__).parent
REFUSED = (
    "mem.add(cell, 1, Order::release, Scope::system)",
    "mem.fetch_add(cell, 1, Scope::system)",
)
ACCEPTED = "mem.add(cell, 1, Order::release); mem.fetch_add(cell, 1)"

DEVICE = """
#include "megamoe/protocol/ptx_memory.cuh"
using namespace megamoe;
extern "C" __global__ void kernel(const Args* args, uint32_t* cell) { Memory mem(*args); %s; }
"""
EMULATED = """
#include "megamoe/protocol/host_memory.h"
using namespace megamoe;
extern "C" void kernel(const Args* args, uint32_t* cell) { Memory mem(*args); %s; }
"""
CHECKED = """
#include "scenarios.h"
using namespace model;
void scenario(Mem& mem, Mem::Cell cell) { %s; }
"""


def check(flags: list[str], source: str) -> None:
    command = ["g++", "-std=c++20", "-fsyntax-only", f"-I{paths.CSRC}", *flags, "-xc++", "-"]
    run = subprocess.run(command, input=source, capture_output=True, text=True)
    if run.returncode:
        raise CompileError(run.stderr)


@pytest.mark.parametrize(
    ("template", "build"),
    [
        (DEVICE, jit.compile_source),
        (EMULATED, partial(check, list(host.FLAGS))),
        (CHECKED, partial(check, [f"-I{MODEL}"])),
    ],
    ids=["sm90", "host", "model"],
)
def test_additions_at_system_scope_do_not_compile(template, build):
    build(template % ACCEPTED)
    for expression in REFUSED:
        with pytest.raises(CompileError, match="add"):
            build(template % expression)
