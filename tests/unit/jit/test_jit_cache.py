"""The build cache: keyed by content, built once, never half a file."""

import json
import multiprocessing
import os
import shutil
import time

import pytest
from programs import start

from megamoe.core.errors import ConfigError
from megamoe.jit import cache, compiler, host, paths
from megamoe.jit.compiler import compile_source, parse_log
from megamoe.jit.source import ACTIVATIONS, Variant, variants

KERNEL = """
#include "megamoe/layout/args.h"
extern "C" __global__ void kernel(uint32_t* out) { out[threadIdx.x] = sizeof(megamoe::Args); }
"""


def copy_of_csrc(folder):
    return shutil.copytree(paths.CSRC, folder)


def test_key_follows_contents_not_places(tmp_path):
    here, there = copy_of_csrc(tmp_path / "a"), copy_of_csrc(tmp_path / "deeper" / "b")
    key = cache.content_key("text", csrc=here)
    assert key == cache.content_key("text", csrc=there) == cache.content_key("text")
    header = there / "megamoe" / "protocol" / "edges.h"
    header.write_text(header.read_text() + " ")
    assert cache.content_key("text", csrc=there) != key
    shutil.copyfile(here / "megamoe" / "protocol" / "edges.h", header)
    assert cache.content_key("text", csrc=there) == key
    machine = there / "fibers" / "machine.h"
    machine.write_text(machine.read_text() + " ")
    assert cache.content_key("text", csrc=there) != key
    shutil.copyfile(here / "fibers" / "machine.h", machine)
    header.rename(header.with_name("renamed.h"))
    assert cache.content_key("text", csrc=there) != key


def test_key_follows_everything_else(tmp_path):
    extra = tmp_path / "version.h"
    extra.write_text("1")
    keys = [
        cache.content_key("text"),
        cache.content_key("Text"),
        cache.content_key("text", flags=["-a"]),
        cache.content_key("text", flags=["-a", "-b"]),
        cache.content_key("text", flags=["-a-b"]),
        cache.content_key("text", compiler="-a"),
        cache.content_key("text", extra_files=[extra]),
    ]
    extra.write_text("2")
    keys.append(cache.content_key("text", extra_files=[extra]))
    assert len(set(keys)) == len(keys)


def test_kernels_have_keys_of_flags_compiler_and_foreign_headers(tmp_path, monkeypatch):
    keys = []

    def fetch(key, *_):
        keys.append(key)
        raise FileNotFoundError

    def compile_again(text, version, *flags):
        (tmp_path / "cutlass" / "version.h").write_text(text)
        monkeypatch.setattr(compiler, "compiler_version", lambda: version)
        with pytest.raises(FileNotFoundError):
            compiler._compiled(KERNEL, "kernel.cu", flags, tmp_path)

    (tmp_path / "cutlass").mkdir()
    monkeypatch.setattr(paths, "cutlass_include", lambda: tmp_path)
    monkeypatch.setattr(cache, "fetch", fetch)
    for made in (("4.2", "nvrtc 13.0"), ("4.3", "nvrtc 13.0"), ("4.2", "nvrtc 13.1")):
        compile_again(*made)
        compile_again(*made)
        compile_again(*made, "-G")
    assert len(set(keys)) == 6
    assert keys[0::3] == keys[1::3]


def test_variants_have_keys_of_their_own(tmp_path):
    every = variants() + variants(profile=True)
    assert {(v.precision, v.activation) for v in every} >= {("bf16", a) for a in ACTIVATIONS}
    assert len(every) == 2 * len(variants()) >= 16
    keys = {cache.content_key(v.source(), csrc=tmp_path) for v in every}  # of their text alone
    assert len(keys) == len(every)
    assert len({str(v) for v in every}) == len(every)
    with pytest.raises(ValueError, match="variant is fp4-swiglu, expected one of"):
        Variant("fp4", "swiglu")


def build_counting(calls, data=b"result"):
    def build(target):
        calls.append(target)
        target.write_bytes(data)
        return {"log": "built"}

    return build


def test_second_fetch_does_not_build(tmp_path):
    calls = []
    for _ in range(3):
        path, notes = cache.fetch("key", ".so", build_counting(calls), tmp_path)
        assert path.read_bytes() == b"result"
        assert notes["log"] == "built"
    assert len(calls) == 1
    assert path.name == "key.so"
    assert not list(tmp_path.glob(".build-*"))


@pytest.mark.parametrize("damage", ["empty", "short", "no notes", "bad notes"])
def test_damaged_results_are_built_again(tmp_path, damage):
    calls = []
    path, _ = cache.fetch("key", ".cubin", build_counting(calls), tmp_path)
    notes = path.with_name(path.name + ".json")
    {
        "empty": lambda: path.write_bytes(b""),
        "short": lambda: path.write_bytes(b"resul"),
        "no notes": notes.unlink,
        "bad notes": lambda: notes.write_text("{"),
    }[damage]()
    path, _ = cache.fetch("key", ".cubin", build_counting(calls), tmp_path)
    assert path.read_bytes() == b"result"
    assert len(calls) == 2


def test_failed_builds_leave_nothing(tmp_path):
    def fails(target):
        target.write_bytes(b"half")
        raise RuntimeError("compiler died")

    with pytest.raises(RuntimeError, match="compiler died"):
        cache.fetch("key", ".cubin", fails, tmp_path)
    with pytest.raises(RuntimeError, match="empty file"):
        cache.fetch("key", ".cubin", build_counting([], b""), tmp_path)
    calls = []
    cache.fetch("key", ".cubin", build_counting(calls), tmp_path)
    assert len(calls) == 1


def slow_build(folder):
    def build(target):
        (folder / f"built-{time.monotonic_ns()}").touch()
        time.sleep(0.3)
        target.write_bytes(b"x" * 1000)
        return {}

    path, _ = cache.fetch("key", ".cubin", build, folder)
    assert path.stat().st_size == 1000


def test_processes_build_once(tmp_path):
    fork = multiprocessing.get_context("fork")
    started = [fork.Process(target=slow_build, args=(tmp_path,)) for _ in range(4)]
    for process in started:
        process.start()
    for process in started:
        process.join()
    assert [process.exitcode for process in started] == [0] * 4
    assert len(list(tmp_path.glob("built-*"))) == 1


def test_a_cached_kernel_is_not_compiled(tmp_path, monkeypatch):
    built = compile_source(KERNEL, directory=tmp_path)
    assert built.seconds > 0
    monkeypatch.setattr(compiler, "_nvrtc", None)
    again = compile_source(KERNEL, directory=tmp_path)
    assert again.seconds == 0
    assert (again.cubin, again.registers) == (built.cubin, built.registers)
    notes = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert notes["bytes"] == len(built.cubin)


def test_flags_matter_and_include_folders_do_not(tmp_path, monkeypatch):
    compile_source(KERNEL, directory=tmp_path)
    moved = copy_of_csrc(tmp_path / "csrc")
    monkeypatch.setattr(paths, "CSRC", moved)
    assert compile_source(KERNEL, directory=tmp_path).seconds == 0
    assert compile_source(KERNEL, directory=tmp_path, flags=["-DX=1"]).seconds > 0


def test_log_is_read():
    log = """ptxas info    : Function properties for a
    96 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 128 registers, used 1 barriers, 96 bytes cumulative stack size, 32 bytes smem
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ..."""
    found = parse_log(log)
    assert (found["registers"], found["stack_bytes"], found["spill_bytes"]) == (128, 96, 28)
    assert found["shared_bytes"] == 32
    assert len(found["warnings"]) == 1


def owned_by(monkeypatch, path, uid):
    """Make os.stat name another owner of `path`: root, who may run the tests, owns everything."""
    real = os.stat

    def stat(name, *args, **kwargs):
        info = list(real(name, *args, **kwargs))
        if os.fspath(name) == os.fspath(path):
            info[4] = uid
        return os.stat_result(info)

    monkeypatch.setattr(cache.os, "stat", stat)


def test_the_folder_is_made_for_its_owner_alone(tmp_path):
    previous = os.umask(0o002)
    try:
        path, _ = cache.fetch("key", ".so", build_counting([]), tmp_path / "a" / "cache")
    finally:
        os.umask(previous)
    assert (tmp_path / "a" / "cache").stat().st_mode & 0o777 == 0o700
    assert path.stat().st_mode & 0o077 == 0
    assert path.with_name("key.lock").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o1777, 0o720])
def test_a_folder_that_others_can_write_is_refused(tmp_path, mode):
    folder = tmp_path / "cache"
    calls = []
    cache.fetch("key", ".so", build_counting(calls), folder)
    folder.chmod(mode)
    with pytest.raises(ConfigError, match=f"{folder} can be written by others .*MEGAMOE_CACHE_DIR"):
        cache.fetch("key", ".so", build_counting(calls), folder)
    folder.chmod(0o755)
    cache.fetch("key", ".so", build_counting(calls), folder)
    assert len(calls) == 1


def test_parents_are_checked_as_ssh_does(tmp_path, monkeypatch):
    parent = tmp_path / "parent"
    folder = parent / "cache"
    cache.secure(folder)
    parent.chmod(0o777)
    with pytest.raises(ConfigError, match=f"but {parent} can be written by others"):
        cache.secure(folder)
    parent.chmod(0o1777)  # sticky, like /tmp
    assert cache.secure(folder) == folder
    parent.chmod(0o775)
    monkeypatch.setattr(cache, "_private_group", lambda gid: True)
    assert cache.secure(folder) == folder
    monkeypatch.setattr(cache, "_private_group", lambda gid: False)
    with pytest.raises(ConfigError, match=f"but {parent} can be written by others"):
        cache.secure(folder)


@pytest.mark.parametrize("of", ["cache", "."])
def test_a_folder_of_somebody_else_is_refused(tmp_path, monkeypatch, of):
    folder = tmp_path / "cache"
    cache.secure(folder)
    other = os.geteuid() + 1234
    owned_by(monkeypatch, (tmp_path / of).resolve(), other)
    with pytest.raises(ConfigError, match=f"belongs to user {other}, not to {os.geteuid()}"):
        cache.fetch("key", ".so", build_counting([]), folder)
    owned_by(monkeypatch, (tmp_path / of).resolve(), 0)  # root may do anything anyway
    assert cache.secure(folder) == folder


def test_a_link_is_followed_before_the_check(tmp_path):
    real = tmp_path / "real"
    real.mkdir(mode=0o777)
    real.chmod(0o777)
    (tmp_path / "link").symlink_to(real)
    with pytest.raises(ConfigError, match=f"{real} can be written by others"):
        cache.secure(tmp_path / "link")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be used"):
        cache.secure(tmp_path / "file")


def test_a_planted_result_is_not_used(tmp_path, monkeypatch):
    """A file of another owner, or a link to one, left from a time when the folder was open."""
    calls = []
    path, _ = cache.fetch("key", ".so", build_counting(calls), tmp_path)
    path.rename(tmp_path / "elsewhere.so")
    path.symlink_to(tmp_path / "elsewhere.so")
    path, _ = cache.fetch("key", ".so", build_counting(calls), tmp_path)
    assert len(calls) == 2
    assert not path.is_symlink()
    real = os.lstat

    def lstat(name, *args, **kwargs):
        info = list(real(name, *args, **kwargs))
        info[4] = os.geteuid() + 1234
        return os.stat_result(info)

    monkeypatch.setattr(cache.os, "lstat", lstat)
    cache.fetch("key", ".so", build_counting(calls), tmp_path)
    assert len(calls) == 3


WARM_ALL = ["megamoe.jit", "--all"]
WARM = """
import runpy
runpy.run_module("megamoe.jit", run_name="__main__", alter_sys=False)
"""
WITHOUT_CUDA = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name == "cuda" or name.startswith(("cuda.", "nvidia")):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
"""


def test_the_warmer_without_the_wheels_says_what_to_install(tmp_path):
    code = WITHOUT_CUDA + WARM
    done = start(WARM_ALL, code, MEGAMOE_CACHE_DIR=str(tmp_path))
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    (line,) = [text for text in done.stderr.splitlines() if "megamoe" in text]
    assert "NVRTC is missing" in line
    assert 'pip install "megamoe[cu13]"' in line


def test_the_warmer_refuses_an_open_folder(tmp_path):
    tmp_path.chmod(0o777)
    done = start(WARM_ALL, WARM, MEGAMOE_CACHE_DIR=str(tmp_path))
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert f"{tmp_path} can be written by others" in done.stderr


def test_a_precompiled_header_that_the_compiler_rejects_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(host, "STANDARD", "#include <cstddef>\nusing Size = std::size_t;\n")
    monkeypatch.setattr(host, "MACHINE", "")  # it compiles for seconds
    assert host.build_source("Size one;", directory=tmp_path).exists()
    (made,) = tmp_path.glob("*.h.gch")
    made.write_bytes(bytes(made.stat().st_size))
    assert host.build_source("Size two;", directory=tmp_path).exists()
