"""Starting the ranks of a command: by torchrun, or one process each; what a rank knows of itself."""

import argparse
import datetime
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megamoe.backends.select import BACKENDS, Opening, choose
from megamoe.core import env
from megamoe.core.config import Problem
from megamoe.group.group import Group
from megamoe.testing import backend_of, gpu_of
from megamoe.testing import launch as spawn

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

    @property
    def group(self) -> dist.ProcessGroup | None:
        """That of all ranks, as backends and layers take it; None for one alone."""
        return dist.group.WORLD if self.size > 1 else None

    def gather(self, value: object) -> list[Any]:
        """Return every rank's value. Collective."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def choose(self, name: str, problem: Problem) -> str:
        """Return the backend that a name stands for on all ranks; a line says why "auto" is not mega. Collective."""
        group = Group.of(dist.group.WORLD)
        return choose(Opening(name, problem, group, self.device)).name

    def print(self, *words: object, sep: str = " ") -> None:
        """Print on rank 0 only."""
        if self.is_first:
            print(*words, sep=sep, flush=True)


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
    options: dict[str, Any] = {"backend": backend, "num_threads": threads, "start_method": method}
    codes = spawn(_run, ranks, worker, args, timeout_s=TIMEOUT_S, **options)
    return max(codes)


def _run(rank: int, worker: Worker, args: argparse.Namespace) -> int:
    size, hosts = dist.get_world_size(), getattr(args, "fake_hosts", None)
    if hosts is not None:
        os.environ["MEGAMOE_HOST"] = f"host {rank * hosts // size}"
    device = torch.device("cpu")
    if torch.cuda.is_available() and not args.cpu:
        device = gpu_of(int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    return worker(Rank(rank, size, device), args)


def add_launch_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --ranks, --cpu and --fake-hosts."""
    add = parser.add_argument
    add("--ranks", type=int, help="processes to spawn; default: all GPUs, 2 on a CPU")
    add("--cpu", action="store_true", help="do not use GPUs")
    add("--fake-hosts", type=int, metavar="N", help="simulate N hosts: cut the ranks into N groups")


def add_backend_argument(parser: argparse.ArgumentParser) -> None:
    """Add --backend."""
    parser.add_argument("--backend", default="auto", choices=("auto", *BACKENDS))
