"""Every kernel compiles for Hopper, within its budgets, and holds the instructions it is made for. Needs no GPU."""

import collections
import ctypes
import re
import shutil
import subprocess

import pytest

from bench import compile_report
from bench.code_size import code_size
from megamoe.core.errors import AbiMismatch, CompileError
from megamoe.core.table import PRECISIONS, TRAINED
from megamoe.jit import abi, paths
from megamoe.jit.__main__ import main as warm
from megamoe.jit.compiler import NVRTC_FLAGS, compile_source, compile_variant
from megamoe.jit.cubin import read_u32
from megamoe.jit.grouped import GroupedVariant, grouped_variants
from megamoe.jit.module import check_abi
from megamoe.jit.quantize import compile_quantize
from megamoe.jit.source import ACTIVATIONS, Variant, variants

SMEM_LIMIT = 232448  # of a Hopper CTA
REGISTERS = 65536 // 512  # what 512 threads may start with


def disassemble(cubin, folder):
    """Return the instructions of each kernel of a cubin, without their addresses."""
    tool = compile_report.find_tool("nvdisasm")
    assert tool, "pip install nvidia-cuda-nvdisasm"
    (folder / "kernel.cubin").write_bytes(cubin)
    text = subprocess.run(
        [tool, "-c", folder / "kernel.cubin"], capture_output=True, text=True, check=True
    ).stdout
    sections = re.split(r"\.section\s+\.text\.(\w+)", text)[1:]
    return {
        name: re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([^;]*)", body, re.MULTILINE)
        for name, body in zip(sections[::2], sections[1::2], strict=True)
    }


def opcodes(cubin, folder):
    """Return the first words of a cubin's instructions, with what follows a dot."""
    return [i.split()[0] for kernel in disassemble(cubin, folder).values() for i in kernel]


# Of the kernels that train those with the least room; the others take two minutes: SLOW=1, or `make compile`.
QUICK = [
    *(Variant(name, activation) for name in TRAINED for activation in ("swiglu", "relu2")),
    *(Variant(name, "swiglu") for name in PRECISIONS if name not in TRAINED),
    Variant("fp8", "clamped_swiglu", kernel="train"),
    Variant("bf16", "clamped_swiglu", kernel="backward"),
    Variant("fp8", "swiglu", kernel="few"),
    Variant("fp8xmxfp4", "swiglu", kernel="few"),
]
QUICK_GROUPED = [
    GroupedVariant("saving", "swiglu"),
    GroupedVariant("activation-e4m3-quantizes", "swiglu"),
    GroupedVariant("weights"),
]
EVERY = variants() + grouped_variants()


@pytest.mark.parametrize(
    "variant",
    [v if v in QUICK + QUICK_GROUPED else pytest.param(v, marks=pytest.mark.slow) for v in EVERY],
    ids=str,
)
def test_variant(variant, tmp_path):
    """Its budgets, its instructions, and the ABI that it states: of one cubin, disassembled once."""
    result = compile_variant(variant)
    assert (result.stack_bytes, result.spill_bytes) == (0, 0)
    assert 0 < result.registers <= REGISTERS  # 0: a log without figures
    assert not [line for line in result.warnings if "Performance Loss" in line or "ignored" in line]
    found = opcodes(result.cubin, tmp_path)
    check_instructions(variant, found)
    assert moved_between_mmas(found) == 0
    assert read_u32(result.cubin, "megamoe_args_bytes") == ctypes.sizeof(
        abi.LAUNCHES[variant.launch]
    )
    assert 64 << 10 < check_abi(result.cubin, str(variant), variant.launch) <= SMEM_LIMIT
    with pytest.raises(AbiMismatch, match=r"its argument has \d+ bytes in the kernel, \d+ in"):
        check_abi(
            result.cubin, str(variant), "train" if variant.launch == "backward" else "backward"
        )


def check_instructions(variant, found):
    count = collections.Counter(re.match(r"\w+", word)[0] for word in found)
    math, other = (
        ("QGMMA", "HGMMA") if PRECISIONS[variant.precision].x.bytes == 1 else ("HGMMA", "QGMMA")
    )
    assert count[math] >= 8
    mixed = variant.kernel == "backward" and math == "QGMMA"  # weight gradients are BF16's
    assert (count[other] > 0) == mixed
    few = variant.kernel == "few"  # whose rows move by ordinary loads and stores
    assert count["UTMALDG"] >= 3 - few  # A, and two halves of B
    assert (count["UTMASTG"] > 0) == (not few)
    packed = PRECISIONS[variant.precision].packed
    assert (count["USETMAXREG"] >= 2) == (not few or packed)
    adds = variant.kernel == "backward" or variant == GroupedVariant("weights")
    assert (count["UTMAREDG"] > 0) == adds  # to main_grad,
    assert (count["UTMAPF"] > 0) == adds  # which is asked into L2 before
    assert count["LDL"] == count["STL"] == 0
    # Neither emulator nor model checker see that one is missing: fence.proxy.async of all memory, not of shared alone.
    pairs = zip(found, found[1:], strict=False)
    fences = sum(pair == ("MEMBAR.ALL.GPU", "FENCE.VIEW.ASYNC.S") for pair in pairs)
    assert fences == fences_of(variant)


def moved_between_mmas(found):
    """Return how many values go to uniform registers between MMAs of one loop: descriptors that ptxas did not keep.

    One branch on what differs between lanes, anywhere around, and each MMA waits for two moves (-2 % backward).
    """
    mmas = [i for i, word in enumerate(found) if word.startswith(("HGMMA", "QGMMA"))]
    near = [(a, b) for a, b in zip(mmas, mmas[1:], strict=False) if b - a < 60]
    return sum(word.startswith("R2UR") for a, b in near for word in found[a:b])


def test_moves_between_mmas_are_seen():
    assert moved_between_mmas(["HGMMA.64x256", "R2UR", "IADD3", "HGMMA.64x256"]) == 1
    assert moved_between_mmas(["HGMMA.64x256", "R2UR", *["IADD3"] * 60, "HGMMA.64x256"]) == 0


UNROLLED = ("MEGAMOE_UNROLL_BY(1)\n        for (int half", "MEGAMOE_UNROLL\n        for (int half")


@pytest.mark.parametrize("unrolled", [False, True])
def test_an_epilogue_fits_where_its_instructions_are_kept(unrolled, monkeypatch, tmp_path):
    """The longest of all variants; and what a tile of a small one would run if its loop over halves were two copies."""
    if unrolled:
        shutil.copytree(paths.CSRC, tmp_path / "csrc")
        header = tmp_path / "csrc" / "megamoe" / "epilogue" / "activation_gradient.cuh"
        text = header.read_text()
        assert text.count(UNROLLED[0]) == 1
        header.write_text(text.replace(*UNROLLED))
        monkeypatch.setattr(paths, "CSRC", tmp_path / "csrc")
    variant = Variant("fp8", "swiglu", kernel="backward")
    if unrolled:
        variant = GroupedVariant("gradient-e4m3-scales", "swiglu")
    result = compile_variant(variant, compile_report.FLAGS)
    size = code_size(compile_report.disassemble(compile_report.find_tool("nvdisasm"), result.cubin))
    # of gemm1, gemm2 and recompute; of weight gradients, two more copies that no tile runs
    assert len(size.epilogues) == (1 if unrolled else 6)
    assert sum(size.roles.values()) == size.kernel
    faults = compile_report.check(variant, result, None, size)
    assert [fault for fault in faults if "epilogue" in fault] == faults
    assert len(faults) == unrolled


def fences_of(variant):
    if isinstance(variant, GroupedVariant):
        return 1  # store, before a launch's first tile
    if variant.kernel == "few":
        return 1  # gather behind h_ready
    if variant.kernel != "backward":
        return (
            3 + variant.panels
        )  # store; load_a behind rows_ready and h_ready; load_b behind panel_ready
    # load_b, before what the phase before stored; behind grads_ready in both; lose_gradients
    return 3 + 4


# What each operation of ptx_memory.cuh becomes: its order and scope are in no test's reach otherwise. A release is a
# MEMBAR before its access, an acquire drops L1 behind it, and both name the scope.
MEMORY = {
    "out = mem.load(cell, Order::relaxed, Scope::gpu)": "LDG.E.STRONG.SYS",
    "out = mem.load(cell, Order::acquire, Scope::gpu)": "LDG.E.STRONG.GPU CCTL.IVALL",
    "out = mem.load(cell, Order::acquire, Scope::system)": "LDG.E.STRONG.SYS CCTL.IVALL",
    "mem.store(cell, out, Order::relaxed, Scope::gpu)": "STG.E.STRONG.SYS",
    "mem.store(cell, out, Order::release, Scope::gpu)": "MEMBAR.ALL.GPU STG.E.STRONG.GPU",
    "mem.store(cell, out, Order::release, Scope::system)": "MEMBAR.ALL.SYS STG.E.STRONG.SYS",
    "uint64_t v = mem.load_word(word(cell)); out = static_cast<uint32_t>(v ^ v >> 32)": "LDG.E.64.STRONG.SYS",
    "mem.store_word(word(cell), out)": "STG.E.64.STRONG.SYS",
    "mem.add(cell, out, Order::relaxed)": "REDG.E.ADD.STRONG.GPU",
    "mem.add(cell, out, Order::release)": "MEMBAR.ALL.GPU REDG.E.ADD.STRONG.GPU",
    "out = mem.fetch_add(cell, out)": "MEMBAR.ALL.GPU ATOMG.E.ADD.STRONG.GPU CCTL.IVALL",
    "mem.fence_proxy_async()": "MEMBAR.ALL.GPU FENCE.VIEW.ASYNC.S",
    "mem.async_complete()": "DEPBAR.LE CCTL.IVALL",
    "out = mem.aborted()": "LDG.E.STRONG.SYS",
    "mem.raise_abort(2)": "MEMBAR.ALL.SYS STG.E.STRONG.SYS",
    "HReady::publish(mem, cell)": "DEPBAR.LE CCTL.IVALL MEMBAR.ALL.GPU REDG.E.ADD.STRONG.GPU",
    "PartialsReady::publish(mem, cell, out)": "MEMBAR.ALL.SYS STG.E.STRONG.SYS",
    "out = PartialsReady::ready(mem, cell, 1)": "LDG.E.STRONG.SYS CCTL.IVALL",
    "out = YRowsReady::ready(mem, cell, 1)": "LDG.E.STRONG.GPU CCTL.IVALL",
}
WORD = "__device__ uint64_t* word(uint32_t* cell) { return reinterpret_cast<uint64_t*>(cell); }\n"
ORDERING = re.compile(r"MEMBAR|FENCE|CCTL|DEPBAR|REDG|ATOMG|\w+(\.\w+)*\.STRONG")
PRIMITIVE = """
extern "C" __global__ void kernel_%d(const __grid_constant__ Args args, uint32_t* cell, uint32_t* result) {
    Memory mem(args);
    uint32_t out = result[0];
    %s;
    result[1] = out;
}
"""


def primitives(statements, folder):
    header = '#include "megamoe/protocol/edges.h"\n#include "megamoe/protocol/ptx_memory.cuh"\n'
    kernels = "".join(PRIMITIVE % pair for pair in enumerate(statements))
    cubin = compile_source(f"{header}using namespace megamoe;\n{WORD}{kernels}").cubin
    found = disassemble(cubin, folder)
    return [found[f"kernel_{i}"] for i in range(len(statements))]


def test_operations_of_memory_have_their_order_and_scope(tmp_path):
    found = primitives(list(MEMORY), tmp_path)
    for (statement, expected), body in zip(MEMORY.items(), found, strict=True):
        words = [i.split()[0] for i in body]
        assert " ".join(filter(ORDERING.match, words)) == expected, statement


def test_times_are_in_units_of_two_to_the_twenty_ns(tmp_path):
    for body in primitives(["out = mem.coarse_time()", "out = mem.coarse_timeout()"], tmp_path):
        shifts = [i.split(",")[2].strip() for i in body if i.startswith("SHF.R.U64")]
        assert shifts == [hex(20)]


# Timestamps are in the roles, which all precisions share: those with the least code beside them and with the most.
@pytest.mark.parametrize(
    ("precision", "kernel"), [("bf16", "forward"), ("fp8xmxfp4", "forward"), ("fp8", "few")]
)
def test_profile_variant_compiles(precision, kernel):
    result = compile_variant(Variant(precision, "swiglu", profile=True, kernel=kernel))
    assert (result.stack_bytes, result.spill_bytes) == (0, 0)


def test_quantize_kernel():
    result = compile_quantize()
    assert (result.stack_bytes, result.spill_bytes) == (0, 0)
    assert result.registers <= 128  # two CTAs of 256 threads an SM, at least


def test_everything_is_warmed_at_once(capsys, monkeypatch):
    """Here the quick ones stand for all."""
    monkeypatch.setattr("megamoe.jit.__main__.variants", lambda profile: QUICK)
    monkeypatch.setattr("megamoe.jit.__main__.grouped_variants", lambda: QUICK_GROUPED)
    assert warm(["--all"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()[1:]
    names = [line.split()[0] for line in lines]
    column = head.index("  regs")
    assert {len(line) for line in lines} == {len(head)}
    assert all(line[column : column + 6].strip().isdigit() for line in lines)
    assert names == ["quantize-weights", *map(str, QUICK + QUICK_GROUPED)]


def test_variants_are_all_that_a_layer_asks_for():
    """Each precision forward, with FP8 rows also for few tokens, MXFP4 for many; all but one train."""
    wanted = {f"{p}-{a}" for p in PRECISIONS for a in ACTIVATIONS}
    wanted |= {f"fp8xmxfp4-{a}-panels" for a in ACTIVATIONS}
    for kernel in ("train", "backward"):
        wanted |= {
            f"{kernel}-{p}-{a}" for p in PRECISIONS if p != "fp8_channel" for a in ACTIVATIONS
        }
    wanted |= {f"backward-fp8-{a}-e4m3-weights" for a in ACTIVATIONS}
    wanted |= {f"few-{p}-{a}" for p in ("fp8", "fp8xmxfp4") for a in ACTIVATIONS}
    wanted |= {f"push-fp8-{a}" for a in ACTIVATIONS}
    assert {str(v) for v in variants()} == wanted
    assert len(variants()) == len(wanted)


def test_the_drivers_cache_is_not_asked():
    """What NVRTC finds there comes without ptxas' figures."""
    assert "--no-cache" in NVRTC_FLAGS
    assert "Used" in compile_quantize().log


def test_errors_show_the_compilers_first_words(tmp_path):
    with pytest.raises(CompileError, match=r"(?s)broken\.cu did not compile.*nonsense"):
        compile_source("int f() { return nonsense; }", name="broken.cu", directory=tmp_path)
