"""Every form of the tensor-core instruction: on fibers against torch, on the device the SASS that it becomes."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_ops import launch, make_args, run, swizzled

from bench.compile_report import find_tool
from megamoe import jit
from megamoe.core.errors import CompileError
from megamoe.jit import host

WIDTHS = (8, 16, 32, 64, 128, 256)
FORMS = [
    (element, n, a, b, source)
    for element in ("bf16", "e4m3")
    for n in WIDTHS
    for a in ("k", "mn")
    for b in ("k", "mn")
    for source in ("shared", "registers")
    if (element == "bf16" or a == b == "k")  # 8 bits are K-major on this machine
    and (a == "k" or source == "shared")
    and (b == "k" or n % 64 == 0)
]
TYPES = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}


@pytest.fixture(scope="module")
def library() -> Any:
    source = Path(__file__).with_name("mma_test.cpp").read_text()
    return ctypes.CDLL(str(host.build_source(source, ("-Wall", "-Wextra", "-Werror"))))


def as_bytes(operand: torch.Tensor) -> np.ndarray:
    return operand.contiguous().view(torch.uint8).numpy()


def image(operand: torch.Tensor, major: str) -> np.ndarray:
    """[rows, K] -> shared memory: rows along K, or boxes of 64 rows of the transpose, 64 of K deep."""
    if major == "k":
        return swizzled(as_bytes(operand)).ravel()
    boxes = [swizzled(as_bytes(box.T)) for box in operand.split(64)]
    return np.concatenate(boxes).ravel()


@pytest.mark.parametrize(("element", "n", "a_major", "b_major", "source"), FORMS)
def test_product(library, element, n, a_major, b_major, source):
    torch.manual_seed(n)
    dtype = TYPES[element]
    depth = 128 // dtype.itemsize
    a, b = (torch.randn(rows, depth).to(dtype) for rows in (64, n))
    memory = np.zeros(40 * 1024, np.uint8)
    in_b = image(b, b_major)
    in_a = as_bytes(a).ravel() if source == "registers" else image(a, a_major)
    memory[: in_b.size], memory[32768 : 32768 + in_a.size] = in_b, in_a
    y = np.full((64, n), np.nan, np.float32)
    name = f"{element}_{n}_{a_major}_{b_major}_{source}"
    launch(getattr(library, name), make_args([], x=memory, y=y), seed=1)
    expected = a.double() @ b.double().T
    torch.testing.assert_close(torch.from_numpy(y).double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (0, "wgmma, B: the descriptor is of the other major-ness"),
        (1, "starts 32 bytes into its rows"),
    ],
)
def test_wrong_descriptors_are_named(library, mistake, message):
    status, report = run(library.mma_misuse, make_args([mistake]))
    assert status == 2
    assert message in report


# --- what the compilers make of each form ---

KERNEL = """
extern "C" __global__ void {name}(float* out, const uint32_t* in) {{
    extern __shared__ __align__(1024) uint8_t smem[];
    float acc[{n} / 2];
    for (int i = 0; i < {n} / 2; ++i) acc[i] = out[i];
    uint32_t a_registers[4] = {{in[0], in[1], in[2], in[3]}};
    arch::fence_operand(a_registers);
    arch::Desc a = {a_desc}, b = {b_desc};
    arch::fence_accumulator(acc);
    arch::wgmma_fence();
    {call};
    arch::wgmma_commit();
    arch::wgmma_wait<0>();
    arch::fence_accumulator(acc);
    for (int i = 0; i < {n} / 2; ++i) out[threadIdx.x * {n} / 2 + i] = acc[i];
}}
"""
DESCRIPTORS = {"k": "arch::make_desc(smem{at})", "mn": "arch::make_desc_mn(smem{at}, 8192)"}


def kernel(element: str, n: int, a: str, b: str, source: str) -> str:
    majors = f"Major::{a}, Major::{b}" if source == "shared" else f"Major::{b}"
    operand = "a" if source == "shared" else "a_registers"
    return KERNEL.format(
        name=f"{element}_{n}_{a}_{b}_{source}",
        n=n,
        a_desc=DESCRIPTORS[a].format(at=""),
        b_desc=DESCRIPTORS[b].format(at=" + 8192"),
        call=f"arch::wgmma<{element}_t, {majors}>(acc, {operand}, b, true)",
    )


def unit(*kernels: str) -> str:
    return '#include "megamoe/arch/arch.cuh"\nusing namespace megamoe;\n' + "".join(kernels)


def test_each_form_is_its_instruction(tmp_path):
    nvdisasm = find_tool("nvdisasm")
    if nvdisasm is None:
        pytest.skip("needs nvdisasm")
    result = jit.compile_source(unit(*(kernel(*form) for form in FORMS)))
    file = tmp_path / "forms.cubin"
    file.write_bytes(result.cubin)
    command = [str(nvdisasm), "-c", str(file)]
    sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    bodies = dict(re.findall(r"\.text\.(\w+):\n(.*?)(?=\n//-----|\Z)", sass, re.DOTALL))
    for element, n, a, b, source in FORMS:
        body = bodies[f"{element}_{n}_{a}_{b}_{source}"]
        mmas = re.findall(r"([HQ]GMMA)\.64x(\d+)x(\d+)\.F32([.\w]*) +R\d+, (\w+)", body)
        assert len(mmas) == 1, body
        name, width, depth, rest, first = mmas[0]
        assert (name, depth) == (("HGMMA", "16") if element == "bf16" else ("QGMMA", "32"))
        assert int(width) == n
        assert first.startswith("gdesc") == (source == "shared"), first
        assert ("tnspA" in body, "tnspB" in body) == (a == "mn", b == "mn"), rest


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (("e4m3", 64, "k", "mn", "shared"), "K-major"),
        (("e4m3", 64, "mn", "k", "shared"), "K-major"),
        (("bf16", 32, "k", "mn", "shared"), "whole boxes"),
        (("bf16", 48, "k", "k", "shared"), "no such instruction"),
    ],
)
def test_what_the_machine_lacks_does_not_compile(form, message):
    with pytest.raises(CompileError, match=message):
        jit.compile_source(unit(kernel(*form)))
