"""Every kernel compiles for Hopper, within its budgets, and holds the instructions it is made for. Needs no GPU."""

import collections
import ctypes
import re
import subprocess

import pytest

from megamoe.errors import CompileError
from megamoe.formats.table import PRECISIONS, TRAINED
from megamoe.jit import abi, paths
from megamoe.jit.__main__ import main as warm
from megamoe.jit.compiler import NVRTC_FLAGS, compile_source, compile_variant
from megamoe.jit.cubin import read_u32
from megamoe.jit.grouped import GroupedVariant, grouped_variants
from megamoe.jit.module import check_abi
from megamoe.jit.quantize import compile_quantize
from megamoe.jit.source import ACTIVATIONS, QUANTIZE_SOURCE, Variant, variants

SMEM_LIMIT = 232448  # of a Hopper CTA
REGISTERS = 65536 // 512  # what 512 threads may start with


def opcodes(cubin, folder):
    """Count the instructions of a cubin by their first word."""
    tool = paths.find_tool("nvdisasm")
    assert tool, "pip install nvidia-cuda-nvdisasm"
    (folder / "kernel.cubin").write_bytes(cubin)
    text = subprocess.run(
        [tool, "-c", folder / "kernel.cubin"], capture_output=True, text=True, check=True
    ).stdout
    found = re.findall(
        r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", text, re.MULTILINE
    )
    return collections.Counter(found)


# Of the kernels that train those with the least room; the others take two minutes: SLOW=1, or `make compile`.
QUICK = [
    *(Variant(name, activation) for name in TRAINED for activation in ("swiglu", "relu2")),
    *(Variant(name, "swiglu") for name in PRECISIONS if name not in TRAINED),
    Variant("fp8", "clamped_swiglu", kernel="train"),
    Variant("bf16", "clamped_swiglu", kernel="backward"),
]
QUICK_GROUPED = [
    GroupedVariant("saving", "swiglu"),
    GroupedVariant("activation-e4m3-quantizes", "swiglu"),
    GroupedVariant("weights"),
]
EVERY = variants() + grouped_variants()


@pytest.fixture(
    params=[
        v if v in QUICK + QUICK_GROUPED else pytest.param(v, marks=pytest.mark.slow) for v in EVERY
    ],
    ids=str,
)
def built(request):
    return request.param, compile_variant(request.param)


def test_budgets(built):
    _, result = built
    assert (result.stack_bytes, result.spill_bytes) == (0, 0)
    assert 0 < result.registers <= REGISTERS  # 0: a log without figures
    assert not [line for line in result.warnings if "Performance Loss" in line or "ignored" in line]


def test_instructions(built, tmp_path):
    variant, result = built
    count = opcodes(result.cubin, tmp_path)
    math, other = (
        ("QGMMA", "HGMMA") if PRECISIONS[variant.precision].x.bytes == 1 else ("HGMMA", "QGMMA")
    )
    assert count[math] >= 8
    mixed = variant.kernel == "backward" and math == "QGMMA"  # weight gradients are BF16's
    assert (count[other] > 0) == mixed
    assert count["UTMALDG"] >= 3  # A, and two halves of B
    assert count["UTMASTG"] >= 1
    adds = variant.kernel == "backward" or variant == GroupedVariant("weights")
    assert (count["UTMAREDG"] > 0) == adds  # to main_grad,
    assert (count["UTMAPF"] > 0) == adds  # which is asked into L2 before
    assert count["USETMAXREG"] >= 2
    assert count["LDL"] == count["STL"] == 0


def test_the_cubin_states_its_abi(built):
    variant, result = built
    assert read_u32(result.cubin, "megamoe_args_bytes") == ctypes.sizeof(abi.Args)
    assert 64 << 10 < check_abi(result.cubin, str(variant)) <= SMEM_LIMIT


# bf16xnvfp4 is bf16xmxfp4 but for a few instructions a scale.
@pytest.mark.parametrize(
    "precision",
    [pytest.param(p, marks=pytest.mark.slow) if p == "bf16xnvfp4" else p for p in PRECISIONS],
)
def test_profile_variant_compiles(precision):
    result = compile_variant(Variant(precision, "swiglu", profile=True))
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
    """Each precision forward, MXFP4 beside FP8 also for many rows; those that train also training and backward."""
    wanted = {f"{p}-{a}" for p in PRECISIONS for a in ACTIVATIONS}
    wanted |= {f"fp8xmxfp4-{a}-panels" for a in ACTIVATIONS}
    for kernel in ("train", "backward"):
        wanted |= {f"{kernel}-{p}-{a}" for p in ("bf16", "fp8") for a in ACTIVATIONS}
    assert {str(v) for v in variants()} == wanted
    assert len(variants()) == len(wanted)


def test_the_drivers_cache_is_not_asked():
    """What NVRTC finds there comes without ptxas' figures."""
    assert "--no-cache" in NVRTC_FLAGS
    assert "Used" in compile_quantize().log


def test_errors_show_the_compilers_first_words(tmp_path):
    with pytest.raises(CompileError, match=r"(?s)broken\.cu did not compile.*nonsense"):
        compile_source("int f() { return nonsense; }", name="broken.cu", directory=tmp_path)


def test_nvcc_agrees(tmp_path, monkeypatch):
    """The same text through nvcc: the quantization kernel, which is quick."""
    if paths.find_tool("nvcc") is None:
        pytest.skip("no nvcc")
    monkeypatch.setenv("MEGAMOE_COMPILER", "nvcc")
    result = compile_source(QUANTIZE_SOURCE, directory=tmp_path)
    assert result.seconds > 0
    assert result.spill_bytes == 0
    assert "megamoe_quantize_weights" in result.log
