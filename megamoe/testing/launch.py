"""Start ranks as processes of this machine, joined by gloo (or NCCL); collect what they return."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megamoe.core import env

# What the fork server imports once, not once for each rank and launch.
PRELOADED = ["torch", "torch.distributed", "torch._dynamo", "megamoe"]


@dataclass(frozen=True)
class _Setup:
    num_ranks: int
    port: int
    backend: str
    timeout_s: float
    num_threads: int
    folder: str
    environment: dict[str, str]


def launch(
    function: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    timeout_s: float = 120.0,
    backend: str = "gloo",
    num_threads: int = 1,
    start_method: str = "forkserver",
) -> list[Any]:
    """Run function(rank, *args) in num_ranks processes with the default process group set up.

    function: importable by name (the new processes import it). Returns what the ranks returned,
    pickled. The first exception of a rank is raised here with its traceback, after the others were
    ended; so is TimeoutError. start_method: "fork" starts at once, from a process that has neither used CUDA nor
    computed with several threads. With NCCL rank r has GPU r; where MEGAMOE_SHARE_GPUS=1 allows more ranks than GPUs,
    they share them, and gloo takes NCCL's place, which refuses that.
    """
    multiprocessing.set_forkserver_preload(PRELOADED)
    # The parent serves the store, on a port that the system picks: no race for a free one.
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="megamoe-launch-") as folder:
        setup = _Setup(
            num_ranks, store.port, backend, timeout_s, num_threads, folder, dict(os.environ)
        )
        context = mp.start_processes(
            _rank_main,
            args=(setup, function, args),
            nprocs=num_ranks,
            join=False,
            start_method=start_method,
        )
        deadline = time.monotonic() + timeout_s
        while not context.join(timeout=max(0.0, min(1.0, deadline - time.monotonic()))):
            if time.monotonic() > deadline:
                alive = [rank for rank, p in enumerate(context.processes) if p.is_alive()]
                for process in context.processes:
                    process.kill()
                raise TimeoutError(f"ranks {alive} of {num_ranks} still ran after {timeout_s:g} s")
        files = [Path(folder, str(rank)) for rank in range(num_ranks)]
        return [pickle.loads(file.read_bytes()) for file in files]


def backend_of(num_ranks: int, backend: str) -> str:
    """Return the process group's backend for so many ranks of this machine: where they share GPUs, never NCCL."""
    shared = env.share_gpus() and num_ranks > torch.cuda.device_count()
    return "gloo" if shared and "nccl" in backend else backend


def gpu_of(rank: int) -> torch.device:
    """Return the GPU of a rank of this machine."""
    shared = env.share_gpus() and torch.cuda.device_count() > 0
    return torch.device("cuda", rank % torch.cuda.device_count() if shared else rank)


def _rank_main(
    rank: int, setup: _Setup, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(setup.num_threads)
    os.environ.update(setup.environment)  # the fork server may be older than the variables
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(setup.num_ranks))
    if "nccl" in setup.backend:
        torch.cuda.set_device(gpu_of(rank))
    timeout = timedelta(seconds=setup.timeout_s)
    store = dist.TCPStore("127.0.0.1", setup.port, None, False, timeout)
    backend = backend_of(setup.num_ranks, setup.backend)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=setup.num_ranks, timeout=timeout
    )
    result = function(rank, *args)
    Path(setup.folder, str(rank)).write_bytes(pickle.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
