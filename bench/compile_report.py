"""tools/compile_report.py: every kernel variant compiled, and what the compiler and the disassembler say of it."""

import argparse
import json
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

from bench.code_size import MOST_EPILOGUE_BYTES, ROLES, CodeSize, code_size
from megamoe import jit
from megamoe.core.table import PRECISIONS
from megamoe.jit import paths

FLAGS = ("-lineinfo",)  # changes no instruction
OPCODES = ("HGMMA", "QGMMA", "UTMALDG", "UTMASTG", "SYNCS", "LDL", "STL")
REQUIRED = ("UTMALDG", "UTMASTG", "SYNCS")  # next to the instructions of a precision
FORBIDDEN = ("LDL", "STL")
FIGURES = "figures.json"


def find_tool(name: str) -> Path | None:
    """Return nvcc, nvdisasm or the like from a wheel, a toolkit or PATH."""
    places = [d / "bin" / name for d in paths.package_dirs("nvidia.cu13")]
    places += [home / "bin" / name for home in paths.toolkits()]
    for path in places:
        if path.is_file():
            return path
    found = shutil.which(name)
    return Path(found) if found else None


def disassemble(nvdisasm: Path, cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(nvdisasm), "-c", "-gi", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def count_opcodes(sass: str) -> Counter[str]:
    """Count instructions by their first word: `/*0a10*/ @P0 UTMALDG.2D ... ;`."""
    opcodes = re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_]+)", sass, re.MULTILINE)
    return Counter(opcodes)


def figures(
    result: jit.CompileResult, counts: Counter[str] | None, size: CodeSize | None = None
) -> dict[str, int]:
    """Return the columns of the table by their names; without a disassembler, those that the log has."""
    found = {
        "regs": result.registers,
        "spill": result.spill_bytes,
        "stack": result.stack_bytes,
        "smem": result.shared_bytes,
    }
    if size is not None:
        found |= {"bytes": size.kernel, "epilogue": size.epilogue, "loop": size.loop}
        found |= {name: size.roles.get(name, 0) for name in ROLES}
    if counts is not None:
        found["instr"] = counts.total() - counts["NOP"]  # which fill up the end
        found.update((name, counts[name]) for name in OPCODES)
    return found


def show_changes(before: dict[str, dict[str, int]], after: dict[str, dict[str, int]]) -> None:
    """Print one line a variant: every figure that differs, as before -> after."""
    print("\nbefore -> after")
    for variant in sorted(before | after):
        if variant not in before or variant not in after:
            print(f"{variant:<32}only {'after' if variant in after else 'before'}")
            continue
        old, new = before[variant], after[variant]
        moved = [f"{n} {old[n]} -> {new[n]}" for n in new if n in old and old[n] != new[n]]
        print(f"{variant:<32}{', '.join(moved) or 'equal'}")


def required(variant: jit.Variant | jit.GroupedVariant) -> set[str]:
    """Return the instructions that a variant must have."""
    of = PRECISIONS[variant.precision]
    if of.packed and variant.kernel == "backward":  # which multiplies packed weights as bf16
        of = PRECISIONS["bf16"]
    found = {*REQUIRED, "QGMMA" if of.x.scaled else "HGMMA"} | ({"PRMT"} if of.packed else set())
    # The rows of a kernel for few tokens are scattered by ordinary stores.
    return found - {"UTMASTG"} if variant.kernel == "few" else found


def check(
    variant: jit.Variant | jit.GroupedVariant,
    result: jit.CompileResult,
    counts: Counter[str] | None,
    size: CodeSize | None = None,
) -> list[str]:
    """Return what is wrong with a compiled variant."""
    faults = []
    if not result.registers:
        faults.append(
            "no figures: the log does not say `Used N registers`; was the cubin cached by the compiler?"
        )
    if result.spill_bytes:
        faults.append(f"{result.spill_bytes} bytes spilled")
    if result.stack_bytes:
        faults.append(f"{result.stack_bytes} bytes of stack")
    faults += result.warnings
    if counts is not None:
        faults += [f"no {name}" for name in sorted(required(variant)) if not counts[name]]
        faults += [f"{counts[name]} {name}" for name in FORBIDDEN if counts[name]]
    if size is not None and not 0 < size.epilogue <= MOST_EPILOGUE_BYTES:
        most = MOST_EPILOGUE_BYTES
        faults.append(
            f"an epilogue of {size.epilogue} bytes, expected at most {most}: make it a loop"
        )
    return faults


def read_figures(folder: Path) -> dict[str, dict[str, int]]:
    """Return what --sass left in a folder: figures by variant. Raises OSError."""
    found: dict[str, dict[str, int]] = json.loads((folder / FIGURES).read_text())
    return found


def report(args: argparse.Namespace, before: dict[str, dict[str, int]]) -> int:
    """Compile, print a line for each variant and what is wrong with it; return 1 if something is.

    before: figures to compare with, where args.against names their folder.
    """
    every = jit.variants(profile=args.profile) + ([] if args.profile else jit.grouped_variants())
    variants = [v for v in every if args.only in str(v)]
    nvdisasm = find_tool("nvdisasm")
    if nvdisasm is None:
        print("no nvdisasm, so no instruction counts: pip install nvidia-cuda-nvdisasm")
    columns: tuple[str, ...] = ("instr", *OPCODES, "bytes", "epilogue", "loop") if nvdisasm else ()
    if args.roles and nvdisasm:
        columns += ROLES
    widths = {name: max(7, len(name)) for name in columns}
    names = "".join(f" {name:>{width}}" for name, width in widths.items())
    print(f"{'variant':<32}{'regs':>5}{'spill':>6}{'stack':>6}{'smem':>8}{'s':>6}{names}")
    after = {}
    failed = 0
    for variant in variants:
        try:
            result = jit.compile_variant(variant, FLAGS)
        except Exception as error:
            failed += 1
            print(f"{variant!s:<32} {error}")
            continue
        counts = size = None
        if nvdisasm:
            sass = disassemble(nvdisasm, result.cubin)
            counts, size = count_opcodes(sass), code_size(sass)
            if args.sass:
                args.sass.mkdir(parents=True, exist_ok=True)
                (args.sass / f"{variant}.cubin").write_bytes(result.cubin)
                (args.sass / f"{variant}.sass").write_text(sass)
        after[str(variant)] = found = figures(result, counts, size)
        numbers = "".join(f" {found[name]:>{width}}" for name, width in widths.items())
        print(
            f"{variant!s:<32}{result.registers:>5}{result.spill_bytes:>6}{result.stack_bytes:>6}"
            f"{result.shared_bytes:>8}{result.seconds:>6.1f}{numbers}",
            flush=True,
        )
        faults = check(variant, result, counts, size)
        failed += bool(faults)
        for fault in faults:
            print(f"    FAIL {fault}")
    if args.sass:
        args.sass.mkdir(parents=True, exist_ok=True)
        (args.sass / FIGURES).write_text(json.dumps(after, indent=1))
    if args.against:
        show_changes({n: f for n, f in before.items() if args.only in n}, after)
    print(f"{len(variants) - failed} of {len(variants)} variants are as they should be")
    return int(failed > 0 or not variants)
