"""Scenarios of tools/soak.py in which a rank fails: every rank must say so, by name and in time."""

import argparse
import faulthandler
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

import megamoe
from bench.ranks import Rank
from bench.soak.layer import CheckedBackend, Outcome, device_of, problem_of
from bench.tree import ROOT
from megamoe.backends.mega.backend import MegaBackend
from megamoe.core.errors import MegaMoEError, PeerFault, ProtocolTimeout, RankMismatch, WindowBroken
from megamoe.window.window import Window

TIMEOUT_S = 3.0
# when the last rank dies -> where the others notice
KILLS = {"between": "routes_ready", "during": "partials_ready"}
KILLS |= {f"{when} backward": edge for when, edge in KILLS.items()}
SOAK = str(ROOT / "tools" / "soak.py")


def error_of(function: Callable[[], object]) -> MegaMoEError | None:
    try:
        function()
    except MegaMoEError as error:
        return error
    return None


def faults(
    me: Rank,
    out: Outcome,
    title: str,
    function: Callable[[], object],
    kinds: tuple[type[MegaMoEError], ...],
    words: list[str],
) -> None:
    """Every rank must raise one of `kinds` or PeerFault, and the message of one rank must hold all words."""
    start, error = time.monotonic(), error_of(function)
    text = f"{title}, rank {me.rank}: {type(error).__name__}: {error} ({time.monotonic() - start:.1f} s)"
    out.notes.append(text)
    out.require(
        isinstance(error, (*kinds, PeerFault)), f"{text}: expected {[k.__name__ for k in kinds]}"
    )
    # The message alone: the title, too, names what was made different.
    named = any(all(word in said for word in words) for said in me.gather(str(error)))
    out.require(named, f"{title}: no rank's message holds {words}")


def late(me: Rank, args: argparse.Namespace) -> Outcome:
    """The last rank comes later than the time-out; after a reset all is well."""
    out, start = Outcome(""), time.monotonic()
    layer = CheckedBackend(me, problem_of(me), count=2, timeout_s=TIMEOUT_S).start()
    last = me.size - 1

    def too_late() -> None:
        time.sleep(2 * TIMEOUT_S if me.rank == last else 0)
        layer.call(0)
        layer.backend.check()

    me.gather(None)
    faults(me, out, "late", too_late, (ProtocolTimeout,), ["routes_ready", f"for rank {last}"])
    out.require(
        isinstance(error_of(lambda: layer.call(0)), WindowBroken), "a broken window took a call"
    )
    layer.backend.reset()
    for _ in range(3):
        layer.note(0, layer.call(0))
    text = layer.verdict(out, layer.settle())
    out.text = f"time-out {TIMEOUT_S:g} s, then reset and 3 calls: {text}; {time.monotonic() - start:.1f} s in all"
    layer.backend.close()
    return out


def mismatch(me: Rank, args: argparse.Namespace) -> Outcome:
    """One rank is built differently; then two layers are called in another order on one rank."""
    out, start, last = Outcome(""), time.monotonic(), me.size - 1
    changes = {"intermediate": 256, "activation": megamoe.activation_by_name("geglu")}
    for name, value in changes.items():
        change: dict[str, Any] = {name: value} if me.rank == last else {}
        problem = problem_of(me, **change)

        def build(problem: megamoe.Problem = problem) -> None:
            MegaBackend(problem, me.group, device=me.device)

        faults(me, out, f"other {name}", build, (RankMismatch,), [name, f"on rank {last}"])
    window = Window(problem_of(me), me.group, device=me.device)
    options: dict[str, Any] = {"count": 2, "window": window, "timeout_s": TIMEOUT_S}
    problems = [problem_of(me, intermediate=i) for i in (512, 768)]
    layers = [CheckedBackend(me, p, **options).start() for p in problems]

    def in_another_order() -> None:
        layers[me.rank == last].call(0)
        window.check()

    me.gather(None)
    words = [f"rank {last} runs another configuration"]
    faults(me, out, "other order of layers", in_another_order, (RankMismatch,), words)
    window.reset()
    for layer in layers:
        layer.note(0, layer.call(0))
    text = "; ".join(layer.verdict(out, layer.settle()) for layer in layers)
    window.close()
    out.text = f"2 configurations and 1 order differed, then reset: {text}; {time.monotonic() - start:.1f} s in all"
    return out


# --- kill: ranks are plain processes, joined by gloo, which neither aborts nor ends the others


def kill(args: argparse.Namespace, ranks: int) -> Outcome:
    """Start the ranks, wait for the survivors' reports within the bound."""
    out, start = Outcome(""), time.monotonic()
    for mode, edge in KILLS.items():
        store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        command = [sys.executable, SOAK, "kill", "--ranks", str(ranks), "--bound", str(args.bound)]
        command += ["--port", str(store.port), "--mode", mode, "--as-rank"]
        environment = {"GLOO_SOCKET_IFNAME": "lo", **os.environ}
        begin: Any = partial(subprocess.Popen, stdout=subprocess.PIPE, text=True, env=environment)
        processes = [begin([*command, str(r)]) for r in range(ranks)]
        named, deadline = False, time.monotonic() + args.bound
        for rank, process in enumerate(processes):
            try:
                text = process.communicate(timeout=max(0.1, deadline - time.monotonic()))[0]
            except subprocess.TimeoutExpired:
                out.failures.append(f"{mode}: rank {rank} still ran after {args.bound:g} s")
                process.kill()
                process.communicate()
                continue
            if rank == ranks - 1:
                died = process.returncode == -signal.SIGKILL
                out.require(died, f"{mode}: the victim ended with {process.returncode}: {text}")
                continue
            report = json.loads(text.splitlines()[-1]) if process.returncode == 0 and text else {}
            kind, message = report.get("kind"), report.get("message", "no report")
            note = (
                f"killed {mode}, rank {rank}: {kind}: {message} ({report.get('seconds', -1):.1f} s)"
            )
            out.notes.append(note)
            good = kind in ("ProtocolTimeout", "PeerFault") and report["seconds"] < TIMEOUT_S + 3
            out.require(good and report["again"] == "WindowBroken", note)
            named |= edge in message and f"rank {ranks - 1}" in message
        out.require(named, f"{mode}: no survivor named edge {edge} and rank {ranks - 1}")
    seconds = time.monotonic() - start
    out.text = f"time-out {TIMEOUT_S:g} s, killed between and during calls of both directions, {seconds:.1f} s in all"
    return out


def killed_rank(args: argparse.Namespace) -> None:
    """Be one of kill's processes. Leaves by os._exit, past all destructors."""
    rank, ranks = args.as_rank, args.ranks
    faulthandler.dump_traceback_later(args.bound, exit=True)
    store = dist.TCPStore("127.0.0.1", args.port, None, False, timedelta(seconds=args.bound))
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=args.bound)
    )
    me = Rank(rank, ranks, device_of(rank))
    layer = CheckedBackend(me, problem_of(me), count=2, timeout_s=TIMEOUT_S).start()
    call: Callable[[], object] = partial(layer.call, 0)
    if args.mode.endswith("backward"):
        call = partial(layer.backward, 0, layer.save(0))
    layer.backend.check()
    me.gather(None)
    if rank == ranks - 1:
        if args.mode.startswith("during"):
            call()  # publishes its routes, then waits for the others
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(2.5)  # a killed process takes its kernels with it, not at once
    start = time.monotonic()

    def fail() -> None:
        call()
        layer.backend.check()

    error = error_of(fail)
    report = {
        "kind": type(error).__name__,
        "message": str(error),
        "seconds": time.monotonic() - start,
    }
    report["again"] = type(error_of(lambda: layer.call(0))).__name__
    print(json.dumps(report), flush=True)
    os._exit(0)
