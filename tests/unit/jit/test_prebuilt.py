"""Kernels compiled elsewhere: the same bytes without a compiler; never one of other sources, damaged or planted."""

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from programs import run_code

from megamoe.core.errors import AbiMismatch, CompileError, ConfigError
from megamoe.jit import cache, compiler, paths, prebuilt
from megamoe.jit.__main__ import main as jit
from megamoe.jit.compiler import NVRTC_FLAGS, compile_source, compile_variant
from megamoe.jit.grouped import grouped_variants
from megamoe.jit.source import FEW, QUANTIZE, QUANTIZE_SOURCE, Variant, variants

VARIANT = Variant("fp8", "swiglu")
KERNEL = """
#include "megamoe/layout/args.h"
extern "C" __global__ void kernel(uint32_t* out) { out[threadIdx.x] = sizeof(megamoe::Args); }
"""
OTHER_ABI = "__device__ unsigned megamoe_args_bytes = 5;\n"


@pytest.fixture
def cache_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGAMOE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("MEGAMOE_PREBUILT", raising=False)
    compiler._say_why.cache_clear()
    return tmp_path / "cache"


def write(folder, source=KERNEL):
    built = compile_source(source)
    made = replace(built, compiler="here")
    prebuilt.write(folder, NVRTC_FLAGS, [("tiny", source, made)])
    return built


@pytest.fixture
def exported(cache_dir, tmp_path, monkeypatch):
    """A folder with KERNEL, in use, and nothing in the cache."""
    write(tmp_path / "made")
    shutil.rmtree(cache_dir)
    monkeypatch.setenv("MEGAMOE_PREBUILT", str(tmp_path / "made"))
    return tmp_path / "made"


@pytest.fixture
def no_compiler(monkeypatch):
    def missing():
        raise CompileError("NVRTC is missing")

    monkeypatch.setattr(compiler, "compiler_version", missing)


WITHOUT_COMPILER = """
import hashlib, json, logging, sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.startswith(("cuda.bindings.nvrtc", "cutlass", "nvidia")):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
from megamoe.core.errors import CompileError
from megamoe.jit import compiler
from megamoe.jit.quantize import compile_quantize
from megamoe.jit.source import Variant
made, absent = Variant("fp8", "swiglu"), Variant("bf16", "geglu")
import torch
from megamoe.jit.grouped import GroupedVariant
from megamoe.ops.machines import Gpu, machine_of
torch.cuda.is_available, torch.cuda.get_device_capability = lambda: True, lambda device: (9, 0)
warned = []
logging.getLogger("megamoe").addHandler(logging.Handler())
logging.getLogger("megamoe").handlers[0].emit = lambda record: warned.append(record.getMessage())
served = [
    type(machine_of(torch.device("cuda", 0), GroupedVariant(*stage))).__name__
    for stage in (["product"], ["saving", "swiglu"], ["saving", "swiglu"])
]
digests = [hashlib.sha256(r.cubin).hexdigest() for r in (compiler.compile_variant(made), compile_quantize())]
try:
    compiler.compile_variant(absent)
except CompileError as error:
    said = str(error)
print(json.dumps([digests, said, compiler.why_not(made), compiler.why_not(absent), compiler.why_not(), served, warned]))
"""


def test_a_process_without_a_compiler_gets_the_same_bytes(tmp_path):
    folder = tmp_path / "made"
    assert jit(["--export", str(folder), "--only", str(VARIANT), QUANTIZE, "grouped-product"]) == 0
    variables = {
        "MEGAMOE_PREBUILT": str(folder),
        "MEGAMOE_CACHE_DIR": str(tmp_path / "cache"),
        "CUDA_HOME": str(tmp_path),
    }
    digests, said, *reasons, served, warned = json.loads(run_code(WITHOUT_COMPILER, **variables))
    here = [compile_variant(VARIANT).cubin, compile_source(QUANTIZE_SOURCE).cubin]
    assert digests == [prebuilt.hashlib.sha256(cubin).hexdigest() for cubin in here]
    assert "has no kernel bf16-geglu with" in said
    assert "NVRTC is missing" in said
    assert reasons[0] is None
    assert "has no kernel bf16-geglu with" in reasons[1]
    assert "NVRTC is missing" in reasons[2]
    assert served == ["Gpu", "NoneType", "NoneType"]  # of megamoe.ops
    (warning,) = warned
    assert "torch's grouped_mm, at 1.1 to 1.7 times" in warning
    assert "has no kernel grouped-saving-swiglu" in warning
    assert not (tmp_path / "cache").exists()


def test_a_prebuilt_kernel_is_what_was_compiled(exported, cache_dir):
    found = compile_source(KERNEL)
    assert (found.origin, found.compiler, found.seconds) == ("prebuilt", "here", 0)
    assert found.registers > 0
    assert not cache_dir.exists()
    assert compile_source(KERNEL + " ").origin == "compiled"
    assert compile_source(KERNEL, flags=["-DX=1"]).origin == "compiled"


def changed_sources(folder, monkeypatch):
    """One byte more in one header."""
    csrc = shutil.copytree(paths.CSRC, folder)
    header = csrc / "megamoe" / "layout" / "args.h"
    header.write_text(header.read_text() + "\n")
    monkeypatch.setattr(paths, "CSRC", csrc)


def test_one_changed_byte_is_compiled_and_said(exported, tmp_path, monkeypatch, caplog):
    changed_sources(tmp_path / "csrc", monkeypatch)
    assert compile_source(KERNEL).origin == "compiled"
    assert compile_source(KERNEL).origin == "cached"
    (record,) = caplog.records
    assert f"{exported} was made from other sources of megamoe" in record.getMessage()


def test_one_changed_byte_is_an_error_without_a_compiler(
    exported, tmp_path, monkeypatch, no_compiler
):
    assert compile_source(KERNEL).origin == "prebuilt"
    changed_sources(tmp_path / "csrc", monkeypatch)
    with pytest.raises(CompileError, match="made from other sources.*NVRTC is missing"):
        compile_source(KERNEL)


def test_another_format_is_another_source(exported, no_compiler):
    manifest = exported / prebuilt.MANIFEST
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(prebuilt.NotPrebuilt, match="other sources"):
        compile_source(KERNEL)


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def link(path):
    path.rename(path.parent.with_name("elsewhere"))
    path.symlink_to(path.parent.with_name("elsewhere"))


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        ("tiny.cubin", flip_a_bit, "tiny.cubin is damaged"),
        ("tiny.cubin", Path.unlink, "tiny.cubin cannot be used"),
        ("tiny.cubin", link, "tiny.cubin is not a regular file"),
        ("tiny.cubin", lambda p: p.chmod(0o666), "tiny.cubin can be written by others"),
        (prebuilt.MANIFEST, Path.unlink, "manifest.json cannot be used"),
        (prebuilt.MANIFEST, lambda p: p.write_text("{"), "manifest.json is damaged"),
        (prebuilt.MANIFEST, lambda p: p.write_text("[]"), "manifest.json is damaged"),
        (prebuilt.MANIFEST, lambda p: p.chmod(0o646), "manifest.json can be written by others"),
        (".", lambda p: p.chmod(0o1777), "made can be written by others"),
        (".", shutil.rmtree, "cannot be used"),
        ("..", lambda p: p.chmod(0o757), "can be written by others"),
    ],
)
def test_damaged_and_open_folders_are_refused(exported, name, damage, said):
    """Also where a compiler is: who put it there has to know."""
    damage(exported / name)
    with pytest.raises(ConfigError, match=said):
        compile_source(KERNEL)
    assert name == "tiny.cubin" or said in compiler.why_not(VARIANT)


def test_a_folder_of_somebody_else_is_refused(exported, monkeypatch):
    real, other = os.lstat, os.geteuid() + 1234

    def lstat(name, *args, **kwargs):
        info = list(real(name, *args, **kwargs))
        info[4] = other
        return os.stat_result(info)

    monkeypatch.setattr(cache.os, "lstat", lstat)
    with pytest.raises(ConfigError, match=f"belongs to user {other}"):
        compile_source(KERNEL)


def test_a_private_group_may_write_as_installers_leave_it(exported, monkeypatch):
    exported.chmod(0o775)
    monkeypatch.setattr(cache, "_private_group", lambda gid: True)
    assert compile_source(KERNEL).origin == "prebuilt"
    monkeypatch.setattr(cache, "_private_group", lambda gid: False)
    with pytest.raises(ConfigError, match="made can be written by others"):
        compile_source(KERNEL)


def test_another_argument_block_is_refused(cache_dir, tmp_path, monkeypatch):
    source = OTHER_ABI + KERNEL
    with pytest.raises(AbiMismatch, match="has 5 bytes there"):
        write(tmp_path / "made", source)
    assert not (tmp_path / "made").exists()
    with monkeypatch.context() as patched:
        patched.setattr(prebuilt, "_check_stamp", lambda cubin, what: None)
        write(tmp_path / "made", source)
    monkeypatch.setenv("MEGAMOE_PREBUILT", str(tmp_path / "made"))
    with pytest.raises(AbiMismatch, match="has 5 bytes there"):
        compile_source(source)


def test_the_package_beside_us_is_found(exported, tmp_path, monkeypatch):
    monkeypatch.delenv("MEGAMOE_PREBUILT")
    assert compile_source(KERNEL).origin == "compiled"
    (tmp_path / "site").mkdir()
    exported.rename(tmp_path / "site" / prebuilt.PACKAGE)
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert compile_source(KERNEL).origin == "prebuilt"
    monkeypatch.setenv("MEGAMOE_PREBUILT", str(tmp_path / "gone"))  # what is stated wins
    with pytest.raises(ConfigError, match="gone"):
        compile_source(KERNEL)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "fp8-swiglu", "nonsense"], "--only nonsense: expected some of quantize"),
    ],
)
def test_what_cannot_be_exported_is_said(arguments, said, tmp_path, capsys):
    with pytest.raises(SystemExit):
        jit(["--export", str(tmp_path / "made"), *arguments])
    assert said in capsys.readouterr().err


def test_an_export_is_whole_or_not_there(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "made"
    monkeypatch.setattr("megamoe.jit.__main__.QUANTIZE_SOURCE", "nonsense")
    assert jit(["--export", str(folder), "--only", QUANTIZE]) == 1
    assert list(tmp_path.iterdir()) == []
    folder.mkdir()
    (folder / "mine").touch()
    assert jit(["--export", str(folder), "--only", QUANTIZE]) == 1
    assert f"--export is {folder}, expected a new or empty folder" in capsys.readouterr().err
    assert [p.name for p in folder.iterdir()] == ["mine"]


def test_readme_lists_kernels_that_exist():
    readme = (paths.CSRC.parent / "README.md").read_text()
    table = readme.split("| for | export |")[1].split("\n\n")[0]
    named = set(re.findall(r"`([a-z0-9-]+)`", table))
    known = {QUANTIZE, *map(str, variants()), *map(str, grouped_variants())}
    assert named <= known
    assert {str(Variant("fp8", "swiglu", kernel=kernel)) for kernel in ("forward", *FEW)} < named
