"""The scenarios of tools/soak.py by name: ranks are started for each, and what they found is told."""

import argparse
import faulthandler
import os
from datetime import timedelta

import torch
import torch.distributed as dist

import megamoe
from bench.ranks import Rank
from bench.soak.backward_faults import train_faults
from bench.soak.calls import busy, calls, graph, streams
from bench.soak.faults import kill, killed_rank, late, mismatch
from bench.soak.layer import Outcome, device_of, problem_of
from bench.soak.nccl import nccl, train_nccl
from bench.soak.training import train, train_graph
from bench.tables import header
from megamoe.core import env
from megamoe.testing import backend_of, launch

BACKENDS = "cpu:gloo,cuda:nccl"
SCENARIOS = {f.__name__: f for f in (calls, graph, nccl, late, mismatch, busy, streams)}
SCENARIOS |= {f.__name__: f for f in (train, train_graph, train_nccl, train_faults)}
NEED_TWO = ("nccl", "kill", "late", "mismatch", "train_nccl")
NEED_NCCL = ("nccl", "train_nccl")


def run_rank(rank: int, name: str, args: argparse.Namespace) -> Outcome:
    """Run a scenario on this rank; its own watchdog ends it with a traceback."""
    faulthandler.dump_traceback_later(args.bound, exit=True)
    out = SCENARIOS[name](Rank(rank, dist.get_world_size(), device_of(rank)), args)
    faulthandler.cancel_dump_traceback_later()
    return out


def report(name: str, ranks: int, outcomes: list[Outcome]) -> int:
    failures = [
        f"rank {rank}: {text}" for rank, out in enumerate(outcomes) for text in out.failures
    ]
    print(f"{'FAIL' if failures else 'ok'}: {name} x{ranks}: {outcomes[0].text}", flush=True)
    for line in failures + [note for out in outcomes for note in out.notes]:
        print(f"  {line}", flush=True)
    return int(bool(failures))


def refuse(name: str, ranks: int) -> None:
    """Raise RuntimeError if the scenario cannot run on so many ranks."""
    if name in NEED_TWO and ranks < 2:
        raise RuntimeError("needs 2 ranks")
    if name in NEED_NCCL and ranks > torch.cuda.device_count():
        raise RuntimeError("needs a GPU for each rank")


def under_torchrun(args: argparse.Namespace) -> int:
    rank, ranks, code = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]), 0
    device_of(rank)
    backend = backend_of(ranks, BACKENDS)
    dist.init_process_group(backend, timeout=timedelta(seconds=args.bound))
    for name in args.scenario:
        refuse(name, ranks)
        out = run_rank(rank, name, args)
        outcomes = Rank(rank, dist.get_world_size(), torch.device("cpu")).gather(out)
        code |= (
            report(name, len(outcomes), outcomes)
            if rank == 0
            else any(o.failures for o in outcomes)
        )
    dist.destroy_process_group()
    return int(code)


def run(args: argparse.Namespace) -> int:
    """Run the scenarios one after the other; return 1 if one failed."""
    if args.as_rank is not None:
        killed_rank(args)
    if "LOCAL_RANK" in os.environ:
        return under_torchrun(args)
    ranks, gpus = args.ranks or min(8, torch.cuda.device_count()), torch.cuda.device_count()
    if gpus == 0 or not 0 < ranks <= (ranks if env.share_gpus() else gpus):
        raise SystemExit(
            f"soak.py needs a GPU for each rank, or MEGAMOE_SHARE_GPUS=1: {gpus} found"
        )
    print(header(), flush=True)
    first = Rank(0, ranks, torch.device("cuda"))
    for precision in args.precision:
        print(
            f"{precision}: {megamoe.memory_report(problem_of(first, precision))['line']}",
            flush=True,
        )
    code = 0
    for name in args.scenario:
        try:
            refuse(name, ranks)
            if name == "kill":
                outcomes = [kill(args, ranks)]
            else:
                outcomes = launch(
                    run_rank, ranks, name, args, timeout_s=args.bound + 30, backend=BACKENDS
                )
            code |= report(name, ranks, outcomes)
        except Exception as error:  # a rank's, with its traceback; or TimeoutError
            print(f"FAIL: {name} x{ranks}: {error}", flush=True)
            code = 1
    return code
