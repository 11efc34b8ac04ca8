"""A process whose CUDA driver is tests/stub/libcuda.c: it launches nothing and remembers what it is told."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Runs in a process of its own, whose libcuda.so.1 is the stub.
PRELUDE = """
import ctypes, json, sys
from unittest import mock
import torch
from megamoe.core.errors import *
from megamoe.core.config import Problem
from megamoe.jit import abi, module
from megamoe.jit.driver import device_attribute
from megamoe.jit.tensormap import encode

stub = ctypes.CDLL("libcuda.so.1")
def number(name):
    return ctypes.c_int.in_dll(stub, name)
def numbers(name, n=8):
    return list((ctypes.c_int * n).in_dll(stub, name))
class Config(ctypes.Structure):
    _fields_ = [("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("smem", ctypes.c_uint),
                ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("count", ctypes.c_uint)]
class Map(ctypes.Structure):
    _fields_ = [(n, ctypes.c_int) for n in ("type", "rank", "swizzle", "promotion", "fill")] + [
        ("base", ctypes.c_uint64), ("dims", ctypes.c_uint64 * 5), ("strides", ctypes.c_uint64 * 4),
        ("box", ctypes.c_uint32 * 5)]
def config():
    c = Config.in_dll(stub, "stub_config")
    return {"grid": list(c.grid), "block": list(c.block), "smem": c.smem, "stream": c.stream, "count": c.count,
            "ids": numbers("stub_attribute_ids")[:c.count], "values": numbers("stub_attribute_values")[:c.count]}
def argument(launch="forward"):
    return abi.LAUNCHES[launch].from_buffer_copy((ctypes.c_uint8 * 16384).in_dll(stub, "stub_argument"))
LARGEST = max(abi.LAUNCHES.values(), key=ctypes.sizeof)
def aligned(structure):
    whole = bytearray(ctypes.sizeof(LARGEST) + structure.alignment)  # of all, the stub copies as many bytes
    return structure.from_buffer(whole, -ctypes.addressof(ctypes.c_char.from_buffer(whole)) % structure.alignment)
abi.aligned = aligned
def maps():
    table = (Map * 64).in_dll(stub, "stub_maps")
    return [{k: list(v) if hasattr(v, "_length_") else v for k in [f[0] for f in Map._fields_]
             for v in [getattr(table[i], k)]} for i in range(number("stub_num_maps").value)]
number("stub_argument_bytes").value = ctypes.sizeof(LARGEST)
"""

# MegaBackend on CPU memory: everything but the kernel is real.
BACKEND = """
class Stream:
    cuda_stream = 0x5000
def on_cpu():
    launches.current_stream_handle = lambda ordinal: Stream.cuda_stream
    changed = {"current_stream": lambda *a: Stream, "is_current_stream_capturing": lambda: False}
    return mock.patch.multiple("torch.cuda", **changed)
KERNEL = module.Kernel(b"cubin", "megamoe_forward", 0, 200000)
from megamoe.backends.mega import backend as mega
from megamoe.backends.call import Call, Needs, Wanted
from megamoe.launch import launches
from megamoe.window.window import Window
from megamoe.formats.weights import ExpertWeights, TurnedWeights, expected_weights
module.load_kernel = lambda variant, device: KERNEL
module.compile_variant = lambda variant: None
problem = Problem(272, 144, 7, 3, max_tokens=70, precision="fp8")
weights = ExpertWeights(**{n: torch.zeros(s, dtype=d) for n, (s, d) in expected_weights(problem).items()})
def y_of(backend, *arguments, **options):
    return backend.forward(Call(*arguments, **options))[0]
def call(backend, tokens=5, weights=weights, **options):
    x = torch.zeros(tokens, 272, dtype=torch.bfloat16)
    ids, scores = torch.zeros(tokens, 3, dtype=torch.int64), torch.zeros(tokens, 3)
    return x, y_of(backend, x, ids, scores, weights, **options)
"""


# Reads one JSON string a line: a program; answers with one line: what it printed last, or its error.
WORKER = """
import contextlib, io, traceback
start = dict(globals())
for line in sys.stdin:
    number("stub_launches").value = number("stub_num_maps").value = 0
    number("stub_blocks_per_sm").value = 1
    encode.cache_clear()
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(json.loads(line), dict(start))
        answer = {"result": json.loads(printed.getvalue().splitlines()[-1])}
    except BaseException:
        answer = {"error": traceback.format_exc()}
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture(scope="session")
def stub_worker(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stub")
    source = ROOT / "tests" / "stub" / "libcuda.c"
    command = ["gcc", "-shared", "-fPIC", "-O1", "-o", folder / "libcuda.so.1", source, "-ldl"]
    subprocess.run(command, check=True)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", PRELUDE + BACKEND + WORKER],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        process.stdin.close()


@pytest.fixture
def run(stub_worker):
    def in_worker(body):
        stub_worker.stdin.write(json.dumps(body) + "\n")
        stub_worker.stdin.flush()
        answer = json.loads(stub_worker.stdout.readline())
        assert "error" not in answer, answer["error"]
        return answer["result"]

    return in_worker
