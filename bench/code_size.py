"""Bytes of a kernel by what they are for: its disassembly with line numbers, instruction by instruction.

A cubin with `-lineinfo` says for each instruction through which lines it came there, call by call: the functions around
these lines are its path. The instructions themselves are those without `-lineinfo`.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from megamoe.jit import paths

INSTRUCTION_BYTES = 16
# A tile's epilogue that is longer waits for its own instructions: docs/tuning.md, "The compiler".
MOST_EPILOGUE_BYTES = 42 * 1024
ROLES = (
    "load_a", "load_b", "store", "scheduler", "math",
    "plan_pass", "fill", "reduce_and_combine", "stage", "route", "leave",
)  # fmt: skip
# The roles of the kernel for few tokens, by the column that they stand in.
_OF_FEW = {
    "leave_counts": "route", "load_few_weights": "load_b", "scatter": "store", "deal": "scheduler",
    "gather": "fill", "multiply_few": "math", "reduce_few": "reduce_and_combine", "leave_few": "leave",
}  # fmt: skip
_LINE = re.compile(r'//## File "([^"]+)", line (\d+)')
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(\w+)")
_DEFINITION = re.compile(r"^(?!\s*//).*MEGAMOE_DEVICE[^(;=]*?\b(\w+)\(")


@dataclass(frozen=True)
class Call:
    """A line that an instruction came through, and the function around it."""

    function: str
    file: str  # in csrc/megamoe
    line: int


@lru_cache
def _definitions(path: Path) -> list[tuple[int, str]]:
    lines = path.read_text().splitlines() if path.is_file() else []
    found = [(number, _DEFINITION.match(line)) for number, line in enumerate(lines, 1)]
    return [(number, match[1]) for number, match in found if match]


def _call(path: str, line: int) -> Call:
    file = path.rpartition("/megamoe/")[2]  # a cubin from the cache may name another checkout
    names = [name for number, name in _definitions(paths.CSRC / "megamoe" / file) if number <= line]
    return Call(names[-1] if names else "", file, line)


def paths_of(sass: str) -> Iterator[list[Call]]:
    """Yield the path of each instruction that is no filling, outermost call first.

    sass: of `nvdisasm -c -gi`, where lines stand before the instructions that they are of, innermost first.
    """
    path: list[Call] = []
    complete = True
    for text in sass.splitlines():
        if line := _LINE.search(text):
            path = ([] if complete else path) + [_call(line[1], int(line[2]))]
            complete = False
        elif instruction := _INSTRUCTION.match(text):
            complete = True
            if instruction[1] != "NOP":
                yield path[::-1]


@dataclass(frozen=True)
class CodeSize:
    """Bytes of a kernel, of each role, and of the math role's epilogues and main loops, one entry for each call."""

    kernel: int
    roles: dict[str, int]
    epilogues: list[int]
    loops: list[int]

    @property
    def epilogue(self) -> int:
        """Of the longest: a tile runs one."""
        return max(self.epilogues, default=0)

    @property
    def loop(self) -> int:
        """Of the longest."""
        return max(self.loops, default=0)


def code_size(sass: str) -> CodeSize:
    """Count what a disassembly has: see paths_of()."""
    roles: Counter[str] = Counter()
    # by the calls up to them, and their file
    epilogues: Counter[tuple[tuple[Call, ...], str]] = Counter()
    loops: Counter[tuple[tuple[Call, ...], str]] = Counter()
    for path in paths_of(sass):
        names = (_OF_FEW.get(call.function, call.function) for call in path)
        role = next((name for name in names if name in ROLES), "other")
        roles[role] += INSTRUCTION_BYTES
        if role != "math":
            continue
        for kind, begins in ((epilogues, _is_epilogue), (loops, _is_loop)):
            begin = next((i for i, call in enumerate(path) if begins(call)), None)
            if begin is not None:
                kind[tuple(path[:begin]), path[begin].file] += INSTRUCTION_BYTES
                break
    return CodeSize(roles.total(), dict(roles), sorted(epilogues.values()), sorted(loops.values()))


def _is_epilogue(call: Call) -> bool:
    names = ("run_elementwise", "finish_wide")
    return call.function in names or (call.function == "run" and call.file.startswith("epilogue/"))


def _is_loop(call: Call) -> bool:
    return call.function.startswith("multiply") and call.file.startswith(("gemm/", "fp4/"))
