"""A process whose CUDA driver is tests/stub/libcuda.c: it launches nothing and remembers what it is told.

Tests with the marker `stub` run there, in a pytest of their own (tests/unit/conftest.py). Their MegaBackend lies in CPU
memory: all but the kernel is real. The functions here return what the driver was told.
"""

import ctypes
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path

import programs
import pytest
import torch
from thread_group import ThreadGroup

from megamoe.backends.call import Call
from megamoe.backends.mega.backend import MegaBackend
from megamoe.core.config import Problem
from megamoe.core.errors import MegaMoEError
from megamoe.formats.weights import ExpertWeights, expected_weights
from megamoe.jit import abi, module
from megamoe.jit.tensormap import encode
from megamoe.launch import launches

SOURCE = Path(__file__).resolve().parents[1] / "stub" / "libcuda.c"
LARGEST = max(
    abi.LAUNCHES.values(), key=ctypes.sizeof
)  # the stub copies as many bytes of each argument

stub: ctypes.CDLL | None = None  # in such a process


def on_ranks(body):
    """Return what body(member of a group) returned on each of two ranks, which are threads."""
    found = [None, None]

    def run(member):
        try:
            found[member.rank] = body(member)
        except BaseException:
            found[member.rank] = traceback.format_exc()

    threads = [threading.Thread(target=run, args=(m,)) for m in ThreadGroup.create(2, 20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(isinstance(of_rank, str) for of_rank in found), found
    return found


class Config(ctypes.Structure):
    _fields_ = [
        *((n, ctypes.c_uint * 3) for n in ("grid", "block")),
        ("smem", ctypes.c_uint),
        *((n, ctypes.c_void_p) for n in ("stream", "attributes")),
        ("count", ctypes.c_uint),
    ]


class Map(ctypes.Structure):
    _fields_ = [
        *((n, ctypes.c_int) for n in ("type", "rank", "swizzle", "promotion", "fill")),
        ("base", ctypes.c_uint64),
        ("dims", ctypes.c_uint64 * 5),
        ("strides", ctypes.c_uint64 * 4),
        ("box", ctypes.c_uint32 * 5),
    ]


class Stream:
    cuda_stream = 0x5000


def number(name):
    return ctypes.c_int.in_dll(stub, f"stub_{name}")


def launched():
    return number("launches").value


def config():
    c = Config.in_dll(stub, "stub_config")
    ids, values = (
        (ctypes.c_int * 8).in_dll(stub, f"stub_attribute_{n}") for n in ("ids", "values")
    )
    return {
        **{n: list(getattr(c, n)) for n in ("grid", "block")},
        **{
            "smem": c.smem,
            "stream": c.stream,
            "attributes": {ids[i]: values[i] for i in range(c.count)},
        },
    }


def argument(launch="forward"):
    return abi.LAUNCHES[launch].from_buffer_copy(
        (ctypes.c_uint8 * 16384).in_dll(stub, "stub_argument")
    )


def maps():
    return list((Map * 64).in_dll(stub, "stub_maps"))[: number("num_maps").value]


def aligned(structure):
    whole = bytearray(ctypes.sizeof(LARGEST) + structure.alignment)
    address = ctypes.addressof(ctypes.c_char.from_buffer(whole))
    return structure.from_buffer(whole, -address % structure.alignment)


def kernel():
    return module.Kernel(b"cubin", "megamoe_forward", 0, 200000)


def on_cpu(monkeypatch):
    """Make MegaBackend launch from CPU memory, on the stream `Stream`, a kernel that is never compiled."""
    made = kernel()
    monkeypatch.setattr(abi, "aligned", aligned)
    monkeypatch.setattr(module, "load_kernel", lambda variant, device: made)
    monkeypatch.setattr(module, "compile_variant", lambda variant: None)
    monkeypatch.setattr(launches, "current_stream_handle", lambda ordinal: Stream.cuda_stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *a: Stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    launches.launch_order.cache_clear()
    number("launches").value = number("num_maps").value = number("no_context").value = 0
    number("blocks_per_sm").value = 1
    number("argument_bytes").value = ctypes.sizeof(LARGEST)
    encode.cache_clear()


PROBLEM = Problem(272, 144, 7, 3, max_tokens=70, precision="fp8")


def weights_of(problem=PROBLEM):
    return ExpertWeights(
        **{n: torch.zeros(s, dtype=d) for n, (s, d) in expected_weights(problem).items()}
    )


def copies(weights):
    return ExpertWeights(**{n: t.clone() for n, t in weights.named().items()})


def tensors(tokens=5):
    """Return x, topk_ids and topk_weights of a call."""
    x = torch.zeros(tokens, 272, dtype=torch.bfloat16)
    return x, torch.zeros(tokens, 3, dtype=torch.int64), torch.zeros(tokens, 3)


def backend_of(problem=PROBLEM, **options):
    return MegaBackend(problem, device="cpu", **options)


def forward(backend, *arguments, **options):
    return backend.forward(Call(*arguments, **options))[0]


def refusal(function, *arguments, of=MegaMoEError, **options):
    """Return the error of a call that has to raise one, before anything is launched."""
    before = launched()
    with pytest.raises(of) as caught:
        function(*arguments, **options)
    assert launched() == before
    return caught.value


class Remote:
    """The loop of the other pytest: it runs the test whose name it receives, and answers with what failed."""

    def __init__(self, pipe):
        self.pipe, self.failed = pipe, ""

    def pytest_runtestloop(self, session):
        items = {item.name: item for item in session.items}
        while (name := self.pipe.recv()) is not None:
            self.failed = ""
            items[name].ihook.pytest_runtest_protocol(item=items[name], nextitem=None)
            self.pipe.send(self.failed)
        return True

    def pytest_runtest_logreport(self, report):
        if not report.passed:
            self.failed += "\n".join([report.longreprtext, *(text for _, text in report.sections)])


def serve(pipe, library, file, log):
    """Be a process whose driver is the stub, and a pytest of one file."""
    global stub
    stub = ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    assert hasattr(ctypes.CDLL("libcuda.so.1"), "stub_launches"), "another driver was loaded before"
    for descriptor in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    sys.modules["driver_stub"] = sys.modules[__name__]
    torch.set_num_threads(1)
    pytest.main(["-q", "-p", "no:cacheprovider", str(file)], plugins=[Remote(pipe)])


class Elsewhere:
    """The pytest of one file behind the stub. It starts with the file's first test and ends with the next file's."""

    def __init__(self):
        self.folder, self.file = tempfile.TemporaryDirectory(), None
        self.library = f"{self.folder.name}/libcuda.so.1"
        flags = ["-shared", "-fPIC", "-O1", "-Wl,-soname,libcuda.so.1", "-o", self.library]
        subprocess.run(["gcc", *flags, SOURCE, "-ldl"], check=True)

    def run(self, file, name):
        """Return what failed in a test, or ""."""
        if file != self.file:
            self.close()
            self.file, self.log = file, Path(self.folder.name, "printed")
            self.pipe, theirs = multiprocessing.Pipe()
            programs.fresh(serve, theirs, self.library, file, self.log).start()
            theirs.close()
        try:
            self.pipe.send(name)
            return self.pipe.recv()
        except (EOFError, OSError):
            self.file = None
            return f"the process with the stub ended\n{self.log.read_text()}"

    def close(self):
        if self.file is not None:
            self.pipe.send(None)
            self.file = None
