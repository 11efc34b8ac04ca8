"""What the tools share: finding megamoe in a bare checkout, starting ranks, shape arguments, a header line."""

import argparse
import datetime
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from tree_hash import tree_hash

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # `python tools/x.py` works without an installation
    sys.path.insert(0, str(ROOT))

from megamoe.core import env  # noqa: E402
from megamoe.core.table import PRECISIONS, TRAINED  # noqa: E402
from megamoe.testing import backend_of, gpu_of  # noqa: E402
from megamoe.testing import launch as spawn  # noqa: E402
from megamoe.testing.shapes import SHAPES, Shape  # noqa: E402

TIMEOUT_S = 3600.0

Worker = Callable[["Rank", argparse.Namespace], int]


@dataclass(frozen=True)
class Rank:
    """This process's place among the others."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def print(self, *words: object) -> None:
        """Print on rank 0 only."""
        if self.is_first:
            print(*words, flush=True)


def launch(worker: Worker, args: argparse.Namespace) -> int:
    """Run worker(rank, args) on every rank and return the worst exit code.

    Under torchrun this process is one rank; otherwise `args.ranks` processes are spawned.
    """
    on_gpu = torch.cuda.is_available() and not args.cpu
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    if "LOCAL_RANK" in os.environ:
        backend = backend_of(int(os.environ["LOCAL_WORLD_SIZE"]), backend)
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=TIMEOUT_S))
        try:
            return _run(dist.get_rank(), worker, args)
        finally:
            dist.destroy_process_group()
    ranks = args.ranks or (torch.cuda.device_count() if on_gpu else 2)
    if on_gpu and ranks > torch.cuda.device_count() and not env.share_gpus():
        raise SystemExit(
            f"--ranks {ranks}: there are {torch.cuda.device_count()} GPUs; or use --cpu, or MEGAMOE_SHARE_GPUS=1"
        )
    threads = max(1, (os.cpu_count() or 1) // ranks)
    # Nothing was computed here so far: without CUDA, ranks need not import torch again.
    method = "forkserver" if torch.cuda.is_available() else "fork"
    options = {"backend": backend, "num_threads": threads, "start_method": method}
    codes = spawn(_run, ranks, worker, args, timeout_s=TIMEOUT_S, **options)
    return max(codes)


def _run(rank: int, worker: Worker, args: argparse.Namespace) -> int:
    device = torch.device("cpu")
    if torch.cuda.is_available() and not args.cpu:
        device = gpu_of(int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    return worker(Rank(rank, dist.get_world_size(), device), args)


def add_launch_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --ranks and --cpu."""
    add = parser.add_argument
    add("--ranks", type=int, help="processes to spawn; default: all GPUs, 2 on a CPU")
    add("--cpu", action="store_true", help="leave GPUs alone")


def add_shape_arguments(parser: argparse.ArgumentParser, default: str) -> None:
    """Add --shape NAME..., and numbers that replace parts of it."""
    parser.add_argument(
        "--shape", nargs="+", choices=list(SHAPES), default=[default], metavar="MODEL",
        help="one or more of " + ", ".join(SHAPES),
    )  # fmt: skip
    parser.add_argument("--hidden", type=int)
    parser.add_argument("--intermediate", type=int)
    parser.add_argument("--experts", type=int, dest="num_experts")
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--activation", help="swiglu, swiglu_oai, geglu, geglu_tanh or relu2")
    parser.add_argument("--bias", action="store_true", default=None)


def refuse_training(parser: argparse.ArgumentParser, precisions: list[str]) -> None:
    """End with a message if one of the precisions is for inference only."""
    for name in precisions:
        if not PRECISIONS[name].trains:
            parser.error(f"--precision {name} is for inference, expected {' or '.join(TRAINED)}")


def shapes_from(args: argparse.Namespace) -> list[Shape]:
    """Return the shapes that the arguments name."""
    names = ("hidden", "intermediate", "num_experts", "top_k", "activation", "bias")
    changed = {n: getattr(args, n) for n in names if getattr(args, n) is not None}
    if not changed:
        return [SHAPES[name] for name in args.shape]
    return [replace(SHAPES[name], name=f"{name}*", **changed) for name in args.shape]


def header() -> str:
    """Return what a measurement needs beside it: date, device, versions, commit, hash of the tree, command."""
    driver = ""
    if torch.cuda.is_available():
        device = f"{torch.cuda.device_count()}x {torch.cuda.get_device_name(0)}"
        query = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        driver = f", driver {query.splitlines()[0] if query else 'unknown'}"
    else:
        device = f"CPU ({os.cpu_count()} cores)"
    commit = _output("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD") or "unknown"
    if _output("git", "-C", str(ROOT), "status", "--porcelain"):
        commit += "+changes"
    command = shlex.join(["python", *sys.argv]) if sys.argv[0] else "python"
    today = datetime.date.today().isoformat()
    versions = f"torch {torch.__version__}, commit {commit}, tree {tree_hash(ROOT)}"
    return f"# {today}, {device}{driver}, {versions}: {command}"


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
