"""Figures of README, the guides and the measurements are recomputed from the files, or formulas, that they come from.

`CLAIMS` has, for a passage of a document, the figures that it should state. A figure of time, memory or speed that no
passage covers is found: a page states none that nothing backs. Tolerances are not figures in this sense. Every file of
docs/measurements/ is one that a claim reads, or a picture.
"""

import csv
import itertools
import re
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import pytest
import torch

from bench.hosts.model import Fabric, predict
from bench.memory_model.predict import Machine, rows_of_experts
from bench.memory_model.predict import predict as predict_bytes
from megamoe.core.config import Problem
from megamoe.launch.meetings import Meet
from megamoe.nn.report import memory_report
from megamoe.testing.shapes import SHAPES

ROOT = Path(__file__).resolve().parents[3]
MEASUREMENTS = ROOT / "docs" / "measurements"
GUIDES = (
    *("adapters", "architecture", "backward", "fp4", "measurements", "numerics", "ops", "protocol"),
    *("hosts", "serving", "testing", "training"),
)
PAGES = ("README.md", *(f"docs/{name}.md" for name in GUIDES))
NUMBER = re.compile(r"(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?(?![\w])")
UNITS = r"(?:us|ms|GHz|GB|TFLOPS|nats|tokens/s|%|times the)"
MEASURED = re.compile(rf"(?<![\w.])\d[\d.,]*(?: (?:to|and) \d[\d.,]*)? ?{UNITS}(?![\w/])")
# sections whose figures tools print and write to no file, or that say how is measured
PRINTED = {
    "docs/measurements.md": ("## Method\n", "## Host\n", "## Training quality\n"),
}
# figures that a reader can work out, and waits that the code has as constants
STATED = {
    "docs/hosts.md": ("46 GB",),  # defaults of tools/hosts_plan.py
    "docs/measurements.md": ("80 GB",),  # the device's memory
    "docs/training.md": ("10 ms",),  # docs/decisions.md, 0017
}
H100, H200 = "2026-11-25-565007b-h100.csv", "2026-11-26-31d8be9-h200.csv"
EP4, PEER = "2026-11-26-938254c-ep4.csv", "2026-11-26-938254c-deepgemm.csv"
FEW = "2026-11-26-6b15deb-ep4.csv"
ALONE = {"dram_read_gb": ""}  # not in turns with the GEMMs in BF16, whose bytes ncu counted
SPUN = "2026-11-26-31d8be9-hosts-spin.csv"
HF = "2026-11-26-0198aff-hf.csv"
FP4, OPS = (f"2026-11-24-9f14869-{what}.csv" for what in ("fp4", "ops"))
FORWARD = "2026-11-23-8d5c926-shapes.csv"
BACKWARD = "2026-11-23-e841b3a-backward-shapes.csv"
FOUR = ("dsv3", "flash", "qwen3-235b", "qwen3-30b")
TOKENS = ("8", "64", "512", "1024", "8192")


# --- files of docs/measurements ---


READ: set[str] = set()  # files that a claim has asked for


@cache
def parsed(name):
    """Return the rows of a CSV, without comments and headers; run: the --name of the command above them."""
    header, run, found = None, "", []
    for line in (MEASUREMENTS / name).read_text().splitlines():
        if line.startswith("#"):
            named = re.search(r" --name (\S+)", line)
            run = named[1] if named else ""
            continue
        (cells,) = csv.reader([line])
        if header is None or cells == header:
            header = cells
        else:
            found.append(dict(zip(header, cells, strict=True)) | {"run": run})
    return found


def rows(name):
    READ.add(name)
    return parsed(name)


def times(name, **wanted):
    """Return the times of the rows that have these values, in the file's order; microseconds."""
    return [float(r["us"]) for r in rows(name) if all(r[k] == v for k, v in wanted.items())]


def us(name, **wanted):
    """Return the mean time of the rows that have these values; microseconds."""
    found = times(name, **wanted)
    assert found, (name, wanted)
    return statistics.mean(found)


def ends(name, column, **wanted):
    """Return the least and the largest value of a column in the rows that have these values."""
    chosen = [r for r in rows(name) if all(r[k] == v for k, v in wanted.items())]
    found = [float(r[column]) for r in chosen if r[column]]
    assert found, (name, column, wanted)
    return min(found), max(found)


# --- what the pages should say ---


def tokens_per_s(name):
    """Return by run the tokens a second of the median step behind the first three."""
    runs = {}
    for row in rows(name):
        runs.setdefault(row["backend"], []).append(float(row["tokens"]) / float(row["seconds"]))
    return {run: statistics.median(steps[3:]) for run, steps in runs.items()}


def by_tokens(shape, precision, tokens=TOKENS):
    """Return the kernel's times of a shape on one H200, by tokens."""
    more = {"shape": shape, "backend": "mega", "mode": "cool", "precision": precision}
    return [us(H200, tokens=t, direction="forward", **more, **ALONE) for t in tokens]


def on_one_gpu(shape):
    """Return a row of the table of one GPU: FP8, BF16, and percent of the FP8 time that memory needs alone."""
    shape, few = f"{shape}/ep4", ("8", "64")
    floors = [ends(H200, "hbm_floor_us", shape=shape, precision="fp8", tokens=t)[0] for t in few]
    taken = by_tokens(shape, "fp8", few)
    return [
        *by_tokens(shape, "fp8"),
        *by_tokens(shape, "bf16", ("8", "512", "8192")),
        *(100 * floor / time for floor, time in zip(floors, taken, strict=True)),
    ]


def of_four(shape, precision="bf16", tokens="8192", backend="mega"):
    """Return a time of a forward pass of four ranks."""
    run = "forward-8192" if tokens == "8192" else "forward"
    which = {"shape": shape, "precision": precision, "tokens": tokens, "backend": backend}
    return us(EP4, run=run, **which)


def beside_peers(shape):
    """Return a row of README's table: FP8 and DeepGEMM by tokens, BF16, its GEMMs, staged."""
    found = [of_four(shape, "fp8", t) for t in TOKENS]
    for t in TOKENS:
        (row,) = (r for r in rows(PEER) if (r["shape"], r["tokens"]) == (shape, t))
        found.append(float(row["dg_us"]))
    return [*found, *(of_four(shape, backend=b) for b in ("mega", "gemms", "staged"))]


def apart_from_peer():
    found = [float(r["relative"]) for r in rows(PEER)]
    return min(found), max(found)


def more_of_four_gpus(shape):
    """Return the GEMMs in FP8, and MXFP4 where it was measured."""
    found = [of_four(shape, "fp8_channel", backend="gemms")]
    if shape in ("dsv3", "flash"):
        found += [us(EP4, run="mxfp4", shape=shape, tokens=t) for t in ("8", "64", "8192")]
    return found


def few_on_four_gpus(shape):
    """Return BF16, its GEMMs and staged, with 8 and 1024 tokens."""
    of = {"shape": shape, "run": "forward"}
    found = []
    for tokens in ("8", "1024"):
        for backend in ("mega", "gemms"):
            found.append(us(FEW, backend=backend, precision="bf16", tokens=tokens, **of))
        # of two, the one in turns with BF16, as below
        found.append(times(FEW, backend="staged", tokens=tokens, **of)[-1])
    return found


def uneven_on_four_gpus():
    """Return BF16, FP8 and staged, each with even, skewed and hot routing, and to one rank."""
    of = {"shape": "qwen3-235b", "run": "routing"}
    kinds = {"backend": "mega", "precision": "bf16"}, {"backend": "mega", "precision": "fp8"}
    return [
        times(FEW, routing=routing, **kind, **of)[0]
        for kind in (*kinds, {"backend": "staged"})
        for routing in ("uniform", "skewed", "hot", "one_rank")
    ]


def trained_on_four_gpus(shape):
    """Return tokens; backward in BF16 and FP8, and its GEMMs; a step likewise, quantizing, staged."""
    tokens = "4096" if shape == "dsv3" else "8192"
    of = {"shape": shape, "run": f"backward-{tokens}"}
    found = [us(EP4, backend="mega", precision=p, **of) for p in ("bf16", "fp8")]
    found += [us(EP4, backend="gemms", **of)]
    if shape in STEPS:
        found += steps(shape)
    return [float(tokens), *found]


STEPS = {"dsv3": "step-dsv3", "qwen3-30b": "step"}


def steps(shape):
    """Return us of a step: BF16, FP8, quantizing, staged."""
    of = {"shape": shape, "run": STEPS[shape]}
    step = {"backend": "mega", "direction": "step", **of}
    return [
        *(us(EP4, precision=p, **step) for p in ("bf16", "fp8")),
        us(EP4, direction="quantize", **of),
        us(EP4, backend="staged", **of),
    ]


def over_nvshmem():
    """Return least and most of the time over NVSHMEM's window, over that of the default."""
    cases = itertools.product(("dsv3", "qwen3-30b"), ("fp8", "bf16"), ("8", "1024", "8192"))
    found = [
        us(EP4, run="nvshmem", shape=s, precision=p, tokens=t) / of_four(s, p, t)
        for s, p, t in cases
    ]
    return min(found), max(found)


def over_two_hosts():
    """Return FP8, BF16 and staged of two hosts of two GPUs, which meet over NVLink, then over sockets."""
    kinds = {"backend": "mega", "precision": "fp8"}, {"backend": "mega", "precision": "bf16"}
    return [
        us(EP4, run=run, shape=shape, tokens="8192", **kind)
        for shape in ("dsv3", "qwen3-235b")
        for run in ("hosts", "hosts-sockets")
        for kind in (*kinds, {"backend": "staged"})
    ]


def gains():
    """Return times of staged, and of DeepGEMM's kernel for many and few tokens, over the layer's: least and most."""
    found = []
    for precision in ("bf16", "fp8"):
        times = [of_four(s, backend="staged") / of_four(s, precision) for s in FOUR]
        found += [min(times), max(times)]
    bf16, *_, staged = steps("qwen3-30b")
    peer = [(int(r["tokens"]), float(r["dg_over_ours"])) for r in rows(PEER)]
    many, few = ([x for t, x in peer if wanted(t)] for wanted in (lambda t: t >= 1024, (8).__eq__))
    return [*found, staged / bf16, min(many), max(many), min(few), max(few)]


def steps_and_transformers():
    bf16, fp8, _, staged = (t / 1e3 for t in steps("qwen3-30b"))
    speed = tokens_per_s(HF)
    return [bf16, fp8, staged, speed["megamoe"] / speed["grouped_mm"]]


def beside_fp8_gemms():
    """Return FP8, FP8 by channel, and torch's GEMMs by token and channel; 8192 tokens."""
    of = ("mega", "fp8"), ("mega", "fp8_channel"), ("gemms", "fp8_channel")
    more = {"tokens": "8192", "direction": "forward", **ALONE}
    return [
        us(H200, shape=f"{shape}/ep4", backend=backend, precision=precision, **more)
        for shape in FOUR
        for backend, precision in of
    ]


def kept_passes():
    """Return the fused backward and one of 1, 2, 4 passes: of gradients in bf16, then added to fp32."""
    of_all = {"tokens": "4096", "direction": "backward", "backend": "mega", **ALONE}
    return [
        us(machine, shape=f"{shape}/ep4", precision=p, gradients=gradients + of, **of_all)
        for machine in (H200, H100)
        for shape, p in itertools.product(("dsv3", "qwen3-30b"), ("bf16", "fp8"))
        for gradients in ("bf16", "main_grad")
        for of in ("", " of 1", " of 2", " of 4")
    ]


def spun():
    """Return tokens, wire, launches, exact and its model, static in a graph and its model."""
    found = []
    for shape, tokens in itertools.product(("dsv3", "qwen3-235b"), ("8192", "1024", "128")):
        of = {"shape": shape, "tokens": tokens}
        for exchange, names in (
            ("static", ("wire", "launches")),
            ("exact", ("layer", "model")),
            ("static", ("replay", "model")),
        ):
            found += [ends(SPUN, name, exchange=exchange, **of)[0] for name in names]
        found.insert(-6, float(tokens))
    return found


def with_fp4():
    names = ("fp8", "fp8xmxfp4", "bf16", "bf16xmxfp4", "bf16xnvfp4")
    return [
        us(FP4, shape=shape, tokens=tokens, precision=name)
        for shape in ("dsv3/ep4", "flash/ep4")
        for tokens in ("8", "64", "8192")
        for name in names
    ]


def operators():
    """Return the rows of the operators' table: ours, torch, and their ratios cool and hot."""
    of = ("swiglu", "dswiglu", "geglu", "dgeglu", "srelu", "dsrelu", "wgrad")

    def row(contender, mode):
        return [us(OPS, case=case, contender=contender, mode=mode) for case in of]

    def ratio(mode):
        return [t / o for o, t in zip(row("megamoe", mode), row("torch", mode), strict=True)]

    return [*row("megamoe", "cool"), *row("torch", "cool"), *ratio("cool"), *ratio("hot")]


def gpt_oss():
    def both(case):
        found = [us(OPS, case=case, contender=c, mode="cool") for c in ("megamoe", "torch")]
        return [found[0] / 1e3, found[1] / 1e3, found[1] / found[0]]

    return flat((both("gpt-oss forward"), both("gpt-oss step")))


def across_hosts():
    """GB that cross hosts, of README's table: DSv3, two hosts of eight ranks, 8192 tokens, bf16."""
    s, hosts = SHAPES["dsv3"], 2
    share = (hosts - 1) / hosts
    experts = s.num_experts / 8 * 3 * s.hidden * s.intermediate * 2
    gathered = 6 * s.top_k * share * 2 * s.hidden * 8192
    rails = [predict(s, precision, 8192, hosts, Fabric()) for precision in ("bf16", "fp8")]
    by_rail = [2e6 * (p.out_mb + p.back_mb) for p in rails]  # backward as much as forward
    found = (2 * share * experts, 3 * share * experts, gathered, *by_rail)
    return [x / 1e9 for x in found]


def planned():
    """The table of docs/hosts.md, as tools/hosts_plan.py has it."""
    rows = [("dsv3", "fp8", 2), ("dsv3", "fp8", 4), ("dsv3", "bf16", 2)]
    rows += [("qwen3-235b", "fp8", 2), ("qwen3-235b", "fp8", 4)]
    for name, precision, hosts in rows:
        p = predict(SHAPES[name], precision, 8192, hosts, Fabric())
        yield from (hosts, p.out_mb, p.back_mb, p.launch, p.wire, p.two_level)
        yield from (p.staged_wire, p.state_gib)


def gelu(x, form):
    return torch.nn.functional.gelu(torch.tensor(x, dtype=torch.float64), approximate=form).item()


def state_gb(shape, tokens):
    s = SHAPES[shape]
    problem = Problem(
        s.hidden, s.intermediate, s.num_experts, s.top_k, ep_size=4, max_tokens=tokens
    )
    return memory_report(problem)["train_state_bytes"] / 1e9


@dataclass(frozen=True)
class Claim:
    """The figures of a page from one text to another, in their order; of tables those behind the first column."""

    page: str
    begin: str
    end: str
    expected: Callable[[], Iterable[float]]
    beside: str = r"$^"  # of these matches numbers are sizes, dates or commits

    def passage(self, text: str) -> tuple[int, int]:
        assert text.count(self.begin) == 1, (self.page, text.count(self.begin), self.begin)
        start = text.index(self.begin) + len(self.begin)
        return start, (text + "\n\n").index(self.end, start)

    def wrong(self, text: str) -> list[str]:
        """Return what is wrong with the figures of the page's text."""
        return self.wrong_of(figures(text[slice(*self.passage(text))], self.beside))

    def wrong_of(self, stated: list[str]) -> list[str]:
        expected = list(self.expected())
        if len(stated) != len(expected):
            return [f"{len(stated)} figures, expected {len(expected)}: {stated}"]
        pairs = zip(stated, expected, strict=True)
        return [f"{figure} is {value:.6g}" for figure, value in pairs if not agrees(figure, value)]


def figures(passage: str, beside: str) -> list[str]:
    lines = passage.splitlines()
    kept = "\n".join(line.split("|", 2)[2] if line.startswith("|") else line for line in lines)
    return [number.replace(",", "") for number in NUMBER.findall(re.sub(beside, " ", kept))]


def agrees(figure: str, value: float) -> bool:
    """Whether a figure is the value, rounded to the figure's own digits."""
    mantissa, _, power = figure.partition("e")
    step = 10.0 ** (int(power or 0) - len(mantissa.partition(".")[2]))
    return abs(float(figure) - value) <= 0.5 * step * (1 + 1e-9)


def flat(lists: Iterable[Iterable[float]]) -> list[float]:
    return [x for one in lists for x in one]


MEASURED_ON_H100 = (("dsv3", "8192"), ("dsv3", "4096"), *((s, "8192") for s in FOUR[1:]))
DIRECTIONS = "forward", "train", "backward"


def beside_gemms(name):
    """Return tokens, then by direction us and GB read, each of the layer and of its GEMMs alone."""
    found = []
    for shape, tokens in MEASURED_ON_H100:
        found.append(float(tokens))
        for direction in DIRECTIONS:
            case = {"shape": f"{shape}/ep4", "tokens": tokens, "direction": direction}
            both = [{"backend": b, **case} for b in ("mega", "gemms")]
            reads = [ends(name, "dram_read_gb", **of)[0] for of in both]
            bytes_of = [{"dram_read_gb": f"{gb:g}"} for gb in reads]
            found += [us(name, **of, **by) for of, by in zip(both, bytes_of, strict=True)]
            found += reads
    return found


@cache
def bytes_by_model():
    """Return GB that a model of L2 says of forward, in the order of the table."""
    found = []
    for shape, tokens in MEASURED_ON_H100:
        local = replace(SHAPES[shape], num_experts=SHAPES[shape].num_experts // 4)
        rows, machine = rows_of_experts(local, int(tokens), 1), Machine()
        found.append(predict_bytes(local, "bf16", rows, Meet(), machine).read_gb)
    return found


def over_gemms():
    """Return least and most over the GEMMs alone: forward, saving, backward without Qwen3-30B; then its own."""
    found = []
    *others, last = MEASURED_ON_H100
    for cases, direction in itertools.product((others, [last]), DIRECTIONS):
        each = []
        for shape, tokens in cases:
            case = {"shape": f"{shape}/ep4", "tokens": tokens, "direction": direction}
            each.append(us(H100, backend="mega", **case) / us(H100, backend="gemms", **case))
        found += sorted({min(each), max(each)})
    return found


CLAIMS = {
    "gains": Claim(
        "README.md",
        "**What it gains.** ",
        "The grey lines",
        gains,
        beside="8192|Qwen3-30B|1024|at 8",
    ),
    "EP1": Claim(
        "docs/measurements.md",
        "| | FP8: 8 | 64 | 512 | 1024 | 8192 | BF16: 8 | 512 | 8192 | memory: 8 | 64 |\n",
        "\n\n",
        lambda: flat(map(on_one_gpu, FOUR)),
    ),
    "EP4": Claim(
        "docs/measurements.md",
        "| | FP8 GEMMs by channel: 8192 | MXFP4: 8 | 64 | 8192 |\n",
        "\n\n",
        lambda: flat(map(more_of_four_gpus, FOUR)),
    ),
    "EP4, few tokens": Claim(
        "docs/measurements.md",
        "| | 8 | GEMMs | `staged` | 1024 | GEMMs | `staged` |\n",
        "\n\n",
        lambda: flat(map(few_on_four_gpus, FOUR)),
    ),
    "EP4, uneven": Claim(
        "docs/measurements.md",
        "| | even | skewed | hot | one rank |\n",
        "\n\n",
        uneven_on_four_gpus,
    ),
    "EP4 trains": Claim(
        "docs/measurements.md",
        "| | tokens | backward: BF16 | FP8 | GEMMs | step: BF16 | FP8 | quantizing | `staged` |\n",
        "\n\n",
        lambda: flat(map(trained_on_four_gpus, FOUR)),
    ),
    "NVSHMEM": Claim(
        "docs/measurements.md", "`MEGAMOE_TRANSPORT=nvshmem`: ", " times", over_nvshmem
    ),
    "apart from DeepGEMM": Claim(
        "docs/measurements.md", "ours; its y is ", " from ours", apart_from_peer
    ),
    "FP8 beside GEMMs": Claim(
        "docs/measurements.md",
        "| | FP8 | by channel | GEMMs |\n",
        "\n\n",
        beside_fp8_gemms,
    ),
    "kept passes": Claim(
        "docs/measurements.md",
        "| | fused | of 1 | of 2 | of 4 | to fp32: fused | of 1 | of 2 | of 4 |\n",
        "\n\n",
        kept_passes,
    ),
    "two hosts of two": Claim(
        "docs/hosts.md",
        "| | FP8 | BF16 | `staged`, BF16 | sockets: FP8 | BF16 | `staged`, BF16 |\n",
        "\n\n",
        over_two_hosts,
    ),
    "hosts that spin": Claim(
        "docs/hosts.md",
        "| tokens | wire | launches | `exact` | model | `static`, a graph | model |\n",
        "\n\n",
        spun,
    ),
    **{
        name: Claim(
            "docs/measurements.md",
            f"| {name} | tokens | us | GEMMs | GB | GEMMs | saving | GEMMs | GB | GEMMs | backward "
            "| GEMMs | GB | GEMMs |\n",
            "\n\n",
            partial(beside_gemms, file),
        )
        for name, file in (("H100", H100), ("H200", H200))
    },
    "bytes by a model": Claim(
        "docs/measurements.md",
        "On H100 `tools/predict_bytes.py` says of the forward passes ",
        " GB",
        bytes_by_model,
    ),
    "over GEMMs": Claim(
        "README.md",
        "over the same GEMMs alone: ",
        " (one H100",
        over_gemms,
        beside="Qwen3-30B",
    ),
    "hosts": Claim(
        "README.md",
        "DeepSeek-V3, 2 hosts of 8, 8192 tokens |\n",
        "\n\n",
        across_hosts,
        beside=r"`[^`]*`|1/N of the memory|2H",
    ),
    "plan": Claim(
        "docs/hosts.md",
        "| layer us | `staged` us | state GiB |\n",
        "\n\n",
        planned,
    ),
    "rounding of y": Claim(
        "docs/numerics.md",
        "| | one rank | two |\n",
        "\n\n",
        lambda: flat(
            ends(FORWARD, "y_fp32", ranks=r, precision=p) for p in ("bf16", "fp8") for r in "12"
        ),
    ),
    "rounding of gradients": Claim(
        "docs/numerics.md",
        "| gradient | BF16, one rank | two | FP8, one rank | two |\n",
        "\n\n",
        lambda: flat(
            ends(BACKWARD, f"{of}_fp32", ranks=r, precision=p)
            for of in ("dx", "d_topk_weights", "dw13", "dw2")
            for p in ("bf16", "fp8")
            for r in "12"
        ),
    ),
    "two forms of gelu": Claim(
        "docs/numerics.md",
        "at gate = -4, where the two forms of gelu ",
        "\n\n",
        lambda: [100 * (1 - gelu(-4.0, "tanh") / gelu(-4.0, "none"))],
    ),
    "operators": Claim(
        "docs/ops.md",
        "| | swiglu | dswiglu | geglu | dgeglu | srelu | dsrelu | wgrad |\n",
        "\n\n",
        operators,
    ),
    "EP4 beside others": Claim(
        "README.md",
        "| DeepGEMM: 8 | 64 | 512 | 1024 | 8192 | BF16: 8192 | GEMMs | `staged` |\n",
        "\n\n",
        lambda: flat(map(beside_peers, FOUR)),
    ),
    "step": Claim(
        "README.md",
        "A step (forward and backward) of Qwen3-30B on four H200, ",
        "One GPU, backward",
        steps_and_transformers,
        beside="8192 tokens|107 M|300 steps|H200|0198aff",
    ),
    "FP4": Claim(
        "docs/fp4.md",
        "| | `fp8` | `fp8xmxfp4` | `bf16` | `bf16xmxfp4` | `bf16xnvfp4` |\n",
        "\n\n",
        with_fp4,
    ),
    "GPT-OSS": Claim(
        "docs/ops.md",
        "GPT-OSS-120B's MLP of experts ",
        "\n\n",
        gpt_oss,
        beside=r"\(128, H = I = 2880, biases\), 24,576 tokens x 4",
    ),
    "state": Claim(
        "docs/training.md",
        "`megamoe.memory_report(layer)` has it: ",
        " FP8 layers",
        lambda: [state_gb("dsv3", 4096), state_gb("qwen3-30b", 8192)],
        beside=r"DeepSeek-V3|4096 tokens|Qwen3-30B|8192\s\(EP4, BF16\)",
    ),
}


def uncovered(page: str, text: str, claims: Iterable[Claim]) -> list[str]:
    """Return the figures of a page that no claim covers."""
    spans = [claim.passage(text) for claim in claims if claim.page == page]
    for heading in PRINTED.get(page, ()):
        assert heading in text, (page, heading)
        begin = text.index(heading)
        spans.append((begin, (text + "\n## ").index("\n## ", begin)))
    found = [m for m in MEASURED.finditer(text) if not any(a <= m.start() < b for a, b in spans)]
    return [m[0] for m in found if m[0] not in STATED.get(page, ())]


@pytest.mark.parametrize("name", CLAIMS)
def test_figures_are_what_their_file_says(name):
    claim = CLAIMS[name]
    assert not claim.wrong((ROOT / claim.page).read_text())


@pytest.mark.parametrize("page", PAGES)
def test_no_page_has_figures_of_unknown_origin(page):
    assert not uncovered(page, (ROOT / page).read_text(), CLAIMS.values())


def test_every_guide_is_looked_at():
    logs = {"api", "decisions", "tuning"}  # a reference, and records with dates and commits
    assert {p.stem for p in (ROOT / "docs").glob("*.md")} - logs == {*GUIDES}


def test_every_file_is_behind_a_figure():
    """What no claim reads is a log: it belongs under a tag. Few files, and small ones."""
    for claim in CLAIMS.values():
        list(claim.expected())
    files = {p.name: p.stat().st_size for p in MEASUREMENTS.iterdir()}
    assert {name for name in files if not name.endswith(".png")} == READ
    assert len(files) <= 12
    assert sum(files.values()) <= 300_000
    pages = "".join((ROOT / page).read_text() for page in PAGES)
    assert not [name for name in files if name not in pages]


@pytest.mark.parametrize("name", CLAIMS)
def test_a_wrong_figure_is_seen(name):
    """Of every claim, whichever of its figures is off by one in its last digit."""
    claim = CLAIMS[name]
    text = (ROOT / claim.page).read_text()
    begin, end = claim.passage(text)
    stated, expected = figures(text[begin:end], claim.beside), list(claim.expected())
    assert stated
    for i, (figure, value) in enumerate(zip(stated, expected, strict=True)):
        wrong = list(stated)
        wrong[i] = further(figure, value)
        assert claim.wrong_of(wrong) == [f"{wrong[i]} is {value:.6g}"]
    assert "figures, expected" in claim.wrong_of(stated[1:])[0]


def further(figure, value):
    """Return a figure that is one of its last digits further from the value."""
    mantissa, e, power = figure.partition("e")
    digits = len(mantissa.partition(".")[2])
    step = 10.0**-digits if float(figure) >= value else -(10.0**-digits)
    return f"{float(mantissa) + step:.{digits}f}{e}{power}"


def test_figures_of_unknown_origin_are_seen():
    text = "It takes 1.3 ms, or 20 to 30 % less, 1.2 times the rate."
    assert uncovered("README.md", text, []) == ["1.3 ms", "20 to 30 %", "1.2 times the"]
    page = "docs/measurements.md"
    text = (ROOT / page).read_text().replace("## Host\n", "Now 7.5 us.\n\n## Host\n")
    assert uncovered(page, text, CLAIMS.values()) == ["7.5 us"]


def test_a_changed_text_is_seen():
    claim, text = CLAIMS["EP4"], (ROOT / "docs" / "measurements.md").read_text()
    assert claim.wrong(text.replace("| 5583 |", "| 5584 |")) == ["5584 is 5582.94"]
    assert "9 figures, expected 10" in claim.wrong(text.replace("| 5583 |", "| |"))[0]
