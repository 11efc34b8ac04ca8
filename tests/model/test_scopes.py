"""Additions exist at gpu scope only: asking for another does not compile, on any machine and in the model checker."""

import re
import subprocess
from functools import partial
from pathlib import Path

import pytest

from megamoe import jit
from megamoe.core.errors import CompileError
from megamoe.jit import host, paths

MODEL = Path(__file__).parent
REFUSED = """
mem.add(cell, 1, Order::release, Scope::system);
mem.fetch_add(cell, 1, Scope::system)"""
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
    with pytest.raises(CompileError) as caught:
        build(template % REFUSED)
    assert set(re.findall(r"\b(?:fetch_)?add\(", str(caught.value))) == {"add(", "fetch_add("}


DISPATCH = (paths.CSRC / "megamoe" / "rows" / "dispatch.cuh").read_text()
PUBLISH = re.compile(r"RowsReady::publish\([^;]*;")


def behind_publish(text: str) -> list[str]:
    """Return what functions still do behind their publish: the release does not cover it."""
    return [body for more in PUBLISH.split(text)[1:] if (body := more.partition("\n}\n")[0])]


def test_a_row_is_published_behind_all_that_is_written_of_it():
    """No test of values sees the other order: two GEMMs lie between the release and the first read."""
    assert len(PUBLISH.findall(DISPATCH)) == 2
    assert behind_publish(DISPATCH) == []
    (dots,) = re.findall(r"    if constexpr.*\n.* multiply_by_bias<T>\(ctx.*\n    }\n", DISPATCH)
    before, _, rest = DISPATCH.partition(dots)
    publish, _, rest = rest.partition("\n}\n")
    assert behind_publish(f"{before}{publish}\n{dots}}}\n{rest}") == [f"\n{dots[:-1]}"]
