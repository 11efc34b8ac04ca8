"""Tools and other programs, each in a process that is forked from one which has imported torch and megamoe.

A new python imports them for three seconds. What depends on how python starts runs in a new one (test_packaging.py).
"""

import importlib
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch

from megamoe.testing.launch import PRELOADED

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 300


def _program(argv, code, environment, path, printed):
    """Be a python that was started with these arguments, variables and folders to import from."""
    for descriptor, file in enumerate(printed, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv, sys.path = argv, [*path, *sys.path]
    torch.set_num_threads(1)
    for folder in path:
        if (Path(folder) / "sitecustomize.py").exists():
            runpy.run_path(str(Path(folder) / "sitecustomize.py"))
    if code is None:
        runpy.run_path(argv[0], run_name="__main__")
    else:
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})


def fresh(target: Callable[..., None], *args: object) -> BaseProcess:
    """Return a process that has imported torch and megamoe and will call target(*args)."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    return multiprocessing.get_context("forkserver").Process(target=target, args=args)


def start(
    argv: Sequence[object],
    code: str | None = None,
    path: Sequence[object] = (ROOT,),
    **variables: str,
) -> subprocess.CompletedProcess:
    """Run a program, or Python text with `argv`; path: folders to import from, perhaps with a sitecustomize.py."""
    argv, path = [str(a) for a in argv], [str(p) for p in path]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path), "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("LOCAL_RANK", None)
    environment |= variables
    with tempfile.TemporaryDirectory() as folder:
        printed = [Path(folder, name) for name in ("stdout", "stderr")]
        process = fresh(_program, argv, code, environment, path, printed)
        process.start()
        process.join(TIMEOUT_S)
        if process.is_alive():
            process.kill()
            raise TimeoutError(f"{argv} still ran after {TIMEOUT_S} s")
        texts = [file.read_text() for file in printed]
    return subprocess.CompletedProcess(argv, process.exitcode, *texts)


def torchrun(
    ranks: int, argv: Sequence[object], code: str | None = None
) -> list[subprocess.CompletedProcess]:
    """Run a program on so many ranks, each a process as torchrun starts it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    job |= {"LOCAL_WORLD_SIZE": str(ranks), "GLOO_SOCKET_IFNAME": "lo"}

    def rank(number: int) -> subprocess.CompletedProcess:
        return start(argv, code, **job, RANK=str(number), LOCAL_RANK=str(number))

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(rank, range(ranks)))


def run(tool: str | Path, *arguments: object, path: Path = ROOT) -> subprocess.CompletedProcess:
    """Run one of tools/, or a program elsewhere."""
    program = ROOT / "tools" / tool
    return start([program, *arguments], path=[program.parent, path, ROOT])


def passes(tool: str | Path, *arguments: object, path: Path = ROOT) -> str:
    """Run one of tools/, which has to succeed; return what it printed."""
    done = run(tool, *arguments, path=path)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_code(code: str, **variables: str) -> str:
    """Run Python text that may import commands of tools/; return what it printed."""
    done = start(["-c"], code, [ROOT / "tools", ROOT], **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout


def tool(name: str) -> ModuleType:
    """Import a command of tools/ into this process, where starting one would take seconds."""
    with mock.patch.object(sys, "path", [str(ROOT / "tools"), *sys.path]):
        return importlib.import_module(name)
