"""tools/predict_bytes.py: what the tiles of a forward launch read from DRAM, by a model of pairs and L2 (model.cpp).

The order and who meets whom are csrc/megamoe/schedule/order.h's own, so a change of them shows its bytes on a CPU. Not
in the model: dispatch and reduce (y_rows are read once: T K H 2 bytes), power, FP4, backward. Beside ncu on one H100,
2026-11-23, GB of the order by steps, forward: dsv3 25 to 34, qwen3-235b 6.1, qwen3-30b 1.3.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import random
import subprocess
import tempfile
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from bench.tree import ROOT
from megamoe.core.table import PRECISIONS
from megamoe.jit import abi
from megamoe.launch.meetings import Meet
from megamoe.testing.shapes import Shape

HERE = Path(__file__).resolve().parent


class MachineStruct(ctypes.Structure):
    _fields_ = (
        ("pairs", ctypes.c_int32),
        *((n, ctypes.c_double) for n in ("l2_bytes", "dram_gb_per_s", "slot_us", "tile_us")),
        *((n, ctypes.c_double) for n in ("speeds", "noise_us", "start_us", "us_per_cycle", "slow")),
    )


class LaunchStruct(ctypes.Structure):
    _fields_ = (
        *((n, ctypes.c_int32) for n in ("num_experts", "tiles1", "tiles2", "slots1", "slots2")),
        *((n, ctypes.c_int32) for n in ("rounds", "saves", "seed")),
        ("meet", abi.STRUCTURES["Meet"]),
    )


class ResultStruct(ctypes.Structure):
    _fields_ = (
        *((n, ctypes.c_double) for n in ("read_bytes", "demand_bytes", "us", "spread_us")),
        *((n, ctypes.c_int32) for n in ("met", "missed")),
    )


@dataclass(frozen=True)
class Machine:
    """A GPU, and how unlike its pairs of CTAs are."""

    pairs: int = 66
    l2_mb: float = 20.0  # that tiles have of a half: H100 has 2 x 25
    dram_gb_per_s: float = 3000.0
    slot_us: float = 0.72  # of MMAs, BF16; FP8 takes 1.15 times that
    speeds: float = 0.007
    slow: float = 0.0  # how much longer one pair takes, relative
    seed: int = 1


@dataclass(frozen=True)
class Prediction:
    """What the model says of a launch."""

    read_gb: float
    demand_gb: float  # what tiles ask for
    ms: float
    spread_us: float  # median between the first and the last pair to begin a round of gemm1
    missed: float  # share of meetings that ran out

    def __str__(self) -> str:
        return (
            f"read {self.read_gb:6.2f} GB of {self.demand_gb:6.1f}  {self.ms:6.2f} ms  "
            f"apart {self.spread_us:4.0f} us  missed {self.missed:4.0%}"
        )


@cache
def library() -> Any:
    """Compile the model."""
    sources = [HERE / "model.cpp", *sorted((ROOT / "csrc/megamoe").rglob("*.h"))]
    key = hashlib.sha1(b"".join(p.read_bytes() for p in sources)).hexdigest()[:16]
    path = Path(tempfile.gettempdir()) / f"megamoe-memory-model-{key}.so"
    if not path.exists():
        made = path.with_suffix(".new")
        command = ["g++", "-O2", "-std=c++20", "-shared", "-fPIC", f"-I{ROOT / 'csrc'}"]
        subprocess.run([*command, str(sources[0]), "-o", str(made)], check=True)
        made.rename(path)
    return ctypes.CDLL(str(path))


def rows_of_experts(shape: Shape, tokens: int, seed: int) -> list[int]:
    """Return rows as top-k of uniform random scores gives them."""
    mean, draw = tokens * shape.top_k / shape.num_experts, random.Random(seed)
    deviation = (mean * (1 - shape.top_k / shape.num_experts)) ** 0.5
    return [max(1, round(draw.gauss(mean, deviation))) for _ in range(shape.num_experts)]


def predict(
    shape: Shape,
    precision: str,
    rows: list[int],
    meet: Meet | None,
    machine: Machine,
    saves: bool = False,
) -> Prediction:
    """Return what a launch reads. rows: of each local expert. meet: None: by steps, nobody meets."""
    size = PRECISIONS[precision].x.bytes
    width = 128 // size
    halves = 2 * shape.intermediate
    slots = -(-shape.hidden // width), -(-shape.intermediate // width)
    given = LaunchStruct(
        len(rows), -(-halves // 256), -(-shape.hidden // 256), *slots,
        shape.hidden // shape.intermediate, saves, machine.seed,
    )  # fmt: skip
    if meet is not None:
        given.meet.rows, given.meet.cycles, given.meet.many = 1, meet.cycles, meet.many
    slot_us = machine.slot_us * (1.15 if size == 1 else 1)
    on = MachineStruct(
        machine.pairs, machine.l2_mb * 1e6, machine.dram_gb_per_s, slot_us, 2.0, machine.speeds,
        1.0, 10.0, 1 / 1600, machine.slow,
    )  # fmt: skip
    out = ResultStruct()
    counts = (ctypes.c_int32 * len(rows))(*rows)
    library().simulate(ctypes.byref(on), ctypes.byref(given), counts, ctypes.byref(out))
    met = max(1, out.met + out.missed)
    return Prediction(
        out.read_bytes / 1e9, out.demand_bytes / 1e9, out.us / 1e3, out.spread_us, out.missed / met
    )


def meet_from(text: str) -> Meet | None:
    """Read "steps", or "rounds,many=6"."""
    if text == "steps":
        return None
    order, *pairs = text.split(",")
    named = dict(pair.split("=") for pair in pairs)
    known = {f.name for f in fields(Meet)}
    if order != "rounds" or named.keys() - known:
        raise argparse.ArgumentTypeError(f"{text!r}, expected steps, or rounds and then {known}")
    return Meet(**{n: int(value) for n, value in named.items()})
