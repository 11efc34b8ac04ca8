"""Tables of measured figures in README.md and docs/, made from the CSVs of docs/measurements/ by tools/gen_docs.py.

A row and a column of a table are conditions on the lines of CSVs; a cell is the mean of the times that meet both.
"""

import csv
import re
import statistics
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

from bench.demo.curves import paired
from bench.hosts.model import Fabric, predict
from bench.memory_model.predict import Machine, rows_of_experts
from bench.memory_model.predict import predict as predict_bytes
from bench.tables import markdown
from bench.tree import ROOT
from megamoe.launch.meetings import Meet
from megamoe.testing.shapes import SHAPES

MEASUREMENTS = ROOT / "docs" / "measurements"
EP4, EP2 = "2026-11-28-5067e49-ep4.csv", "2026-11-29-0f47660-ep2.csv"
PEER = "2026-11-28-5067e49-deepgemm.csv"
H100, H200 = "2026-11-25-565007b-h100.csv", "2026-11-28-5067e49-h200.csv"
HF = "2026-11-26-0198aff-hf.csv"
SPUN, PRINTED = "2026-11-26-31d8be9-hosts-spin.csv", "printed.csv"
LOOP, E4M3 = "2026-11-27-43b46f1-loop.csv", "2026-11-28-ca7e45d-e4m3.csv"
FP4, OPS = "2026-11-28-5067e49-fp4.csv", "2026-11-28-5067e49-ops.csv"
FORWARD, BACKWARD = "2026-11-23-8d5c926-shapes.csv", "2026-11-23-e841b3a-backward-shapes.csv"

MODELS = {
    "dsv3": "DeepSeek-V3",
    "flash": "DeepSeek-V4-Flash",
    "qwen3-235b": "Qwen3-235B",
    "qwen3-30b": "Qwen3-30B",
}
TOKENS = (8, 64, 512, 1024, 8192)
# Of a line: what its columns should be, or a predicate of them. Also: file; column, of which a cell is the mean.
Where = Mapping[str, Any]
Column = Where | tuple[Where, Where]  # of two, the first over the second


# --- the files ---


@cache
def lines(name: str) -> list[dict[str, str]]:
    """Return the lines of a CSV. run: the --name of the command above a line; name: its shape, without "/ep4"."""
    header, run, found = None, "", []
    for line in (MEASUREMENTS / name).read_text().splitlines():
        if line.startswith("#"):
            named = re.search(r" --name (\S+)", line)
            run = named[1] if named else ""
            continue
        (cells,) = csv.reader([line])
        if header is None or cells[0] == header[0]:  # a part may have columns of its own
            header = cells
            continue
        row = dict(zip(header, cells, strict=True))
        found.append({**row, "run": run, "name": row.get("shape", "").partition("/")[0]})
    return found


def values(file: str, column: str = "us", **where: Any) -> list[float]:
    """Return a column of the lines that meet the conditions, in the file's order."""
    met = [
        r
        for r in lines(file)
        if all(v(r[k]) if callable(v) else r.get(k) == str(v) for k, v in where.items())
    ]
    found = [float(r[column]) for r in met if r[column]]
    if not found:
        raise LookupError(f"{file} has no {column} where {where}")
    return found


def mean(file: str, column: str = "us", **where: Any) -> float:
    return statistics.mean(values(file, column, **where))


def origin(*names: str, run: str = "") -> str:
    """Return hardware, date, commit and link of each file. run: another date and commit than in its name."""
    said = []
    for name in names:
        if name == PRINTED:
            said.append(f"[CSV](measurements/{name})")
            continue
        date, tree, _ = re.findall(r"(\d+-\d+-\d+)-(\w+)-?(.*)", run or name)[0]
        first = (MEASUREMENTS / name).read_text().partition("\n")[0]
        gpus = " and ".join("x ".join(gpu) for gpu in re.findall(r"(\d+)x NVIDIA (H\d+)", first))
        said.append(f"{gpus}, {date}, commit {tree} ([CSV](measurements/{name}))")
    return "; ".join(said) + "."


# --- tables ---


def wrapped(text: str) -> str:
    words = " ".join(text.split())
    return textwrap.fill(words, 120, break_long_words=False, break_on_hyphens=False)


def table(above: str, head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table below where its figures come from."""
    return f"{wrapped(above)}\n\n{markdown(list(head), [list(row) for row in rows])}"


def pivot(
    first: str,
    rows: Mapping[str, Where],
    columns: Mapping[str, Column],
    runs: Mapping[str, str] = {},
    **base: Any,
) -> str:
    """Return a table of means, or of ratios where a column is a pair, below where its files come from.

    form: how a column's cells are written. runs: dates and commits of files, where their names have others.
    """
    used: dict[str, None] = {}

    def value(row: Where, column: Where) -> float:
        where = {**base, **row, **column}
        where.pop("form", "")
        used[where["file"]] = None
        return mean(**where)

    def cell(row: Where, column: Column) -> str:
        if isinstance(column, tuple):
            over, under = (value(row, part) for part in column)
            return f"{over / under:{column[0].get('form', '.2f')}}x"
        return f"{value(row, column):{column.get('form', ',.0f')}}"

    made = [[label, *(cell(row, c) for c in columns.values())] for label, row in rows.items()]
    origins = " ".join(origin(name, run=runs.get(name, "")) for name in used)
    return table(origins, [first, *columns], made)


def model_rows(*names: str, **more: Any) -> dict[str, Where]:
    return {MODELS[name]: {"name": name, **more} for name in names or MODELS}


def token_rows(cases: Iterable[tuple[str, int]]) -> dict[str, dict[str, Any]]:
    return {f"{MODELS[m]}, {t:,} tokens": {"name": m, "tokens": t} for m, t in cases}


def span(found: Iterable[float], form: str = ".2f") -> str:
    """Return the least and the largest of ratios."""
    least, *_, most = sorted(found)
    return f"{least:{form}}-{most:{form}}x"


MEGA, STAGED, GEMMS = ({"backend": name} for name in ("mega", "staged", "gemms"))
BF16, FP8 = ({**MEGA, "precision": p} for p in ("bf16", "fp8"))
NCCL = "NCCL + grouped_mm BF16"


def forward_of(tokens: int) -> dict[str, Any]:
    """Return where forward passes of four GPUs stand that had staged and the GEMMs in turns."""
    return {"file": EP4, "run": "forward-8192" if tokens == 8192 else "forward", "tokens": tokens}


def over_nccl(model: str, tokens: int, kind: Where = BF16) -> float:
    """Return staged's time over the kernel's."""
    of = {"name": model, **forward_of(tokens)}
    return mean(**of, **STAGED) / mean(**of, **kind)


# Both in turns, on so many ranks.
OURS_OF: dict[int, dict[str, Any]] = {
    r: {"file": PEER, "run": "", "mode": "cool", "kernel": "megamoe", "ranks": r} for r in (1, 2, 4)
}
PEERS_OF = {r: {**of, "kernel": "DeepGEMM"} for r, of in OURS_OF.items()}
# What in that file is of other commits than its name says; the lines above its parts say so, too.
OLDER = {
    2: "Next to DeepGEMM, two GPUs are of commit 582780f.",
    4: """Next to DeepGEMM, DeepSeek-V3 with 8 to 512 tokens and DeepSeek-V4-Flash with 64 and 512 are of 2026-11-26,
        commit 938254c, on four GPUs.""",
}


def over_deepgemm(model: str, tokens: int, ranks: int = 4) -> float:
    of: dict[str, Any] = {"name": model, "tokens": tokens}
    return mean(**of, **PEERS_OF[ranks]) / mean(**of, **OURS_OF[ranks])


BY_E4M3, _BY_BF16 = ({"gradients": f"bf16 by {kind}"} for kind in ("e4m3", "bf16"))
BY_BF16 = "FP8, BF16 dW"
ALL = [(model, tokens) for model in MODELS for tokens in TOKENS]
LARGE = [("dsv3", 4096), *((model, 8192) for model in MODELS if model != "dsv3")]
TWO_GPUS = [(m, t) for m in MODELS for t in (4096, 8192)]
STEP = {"direction": "step"}


def few_tokens() -> str:
    cases = [*((m, t) for m in MODELS for t in (8, 64)), ("flash", 512), ("qwen3-30b", 512)]
    columns: dict[str, Column] = {
        "one GPU": OURS_OF[1],
        "DeepGEMM": PEERS_OF[1],
        "speed-up": (PEERS_OF[1], OURS_OF[1]),
        "two GPUs": OURS_OF[2],
        "DeepGEMM on two": PEERS_OF[2],
        "speed-up on two": (PEERS_OF[2], OURS_OF[2]),
    }
    return f"{pivot('model, tokens', token_rows(cases), columns)}\n\n{OLDER[2]}"


def forward() -> str:
    differs = span(values(PEER, "relative", ranks=4), ".3f").rstrip("x")
    made = pivot(
        "model, tokens per rank",
        {label: {**row, **forward_of(row["tokens"])} for label, row in token_rows(ALL).items()},
        {
            "FP8": OURS_OF[4],
            "DeepGEMM FP8": PEERS_OF[4],
            "speed-up": (PEERS_OF[4], OURS_OF[4]),
            "BF16": BF16,
            NCCL: STAGED,
            "speed-up ": (STAGED, BF16),
            "GEMMs alone BF16": {**GEMMS, "precision": "bf16"},
        },
    )
    differs = f"DeepGEMM's y differs from ours by {differs} (relative Frobenius norm)."
    return f"{made}\n\n{wrapped(f'{OLDER[4]} {differs}')}"


FOUR_GPUS: dict[str, Callable[[], str]] = {
    "forward": forward,
    "mxfp4": partial(
        pivot,
        "model",
        model_rows("dsv3", "flash", file=EP4, run="mxfp4"),
        {f"{t:,} tokens": {"tokens": t} for t in (8, 64, 8192)},
    ),
    "backward": partial(
        pivot,
        "model, tokens per rank",
        {
            label: {**row, "run": f"backward-{row['tokens']}", "file": EP4}
            for label, row in token_rows(LARGE).items()
        },
        {"BF16": BF16, "FP8": FP8 | BY_E4M3, BY_BF16: FP8 | _BY_BF16, "GEMMs alone BF16": GEMMS},
    ),
    "step": partial(
        pivot,
        "model, tokens per rank",
        {
            "DeepSeek-V3, 4,096 tokens": {"run": "step-dsv3", "file": EP4},
            "Qwen3-30B, 8,192 tokens": {"run": "step", "file": EP4},
        },
        {
            "BF16": BF16,
            "FP8": FP8 | BY_E4M3,
            BY_BF16: FP8 | _BY_BF16,
            "quantizing": {"direction": "quantize"},
            NCCL: STAGED,
            "speed-up BF16": (STAGED, BF16),
            "FP8 ": (STAGED, FP8 | BY_E4M3),
        },
    ),
    "step-ep2": partial(
        pivot,
        "model, tokens per rank",
        token_rows(TWO_GPUS),
        {
            "forward": ({"direction": "train", **BF16}, {"direction": "train", **FP8}),
            "backward": ({"direction": "backward", **BF16}, {"direction": "backward", **FP8}),
            "step BF16": STEP | BF16,
            "FP8": STEP | FP8,
            "quantizing": {"direction": "quantize"},
            "step": (STEP | BF16, STEP | FP8),
        },
        file=EP2,
    ),
    "routing": partial(
        pivot,
        "routing",
        {"megamoe BF16": BF16, "megamoe FP8": FP8, NCCL: STAGED},
        {n.replace("_", " "): {"routing": n} for n in ("uniform", "skewed", "hot", "one_rank")},
        file=EP4,
        name="qwen3-235b",
        run="routing",
    ),
    "nvshmem": partial(
        pivot,
        "model",
        {
            f"{MODELS[m]} {kind['precision'].upper()}": {"name": m, "file": EP4, **kind}
            for m in ("dsv3", "qwen3-30b")
            for kind in (BF16, FP8)
        },
        {
            f"{t:,} tokens": ({"tokens": t, "run": run}, {"tokens": t, "run": "nvshmem"})
            for t, run in ((8, "forward"), (1024, "forward"), (8192, "forward-8192"))
        },
    ),
}

LOCAL = {"file": H200, **MEGA, "direction": "forward", "dram_read_gb": ""}
FLOOR = {"column": "hbm_floor_us", "precision": "fp8"}
CASES = [("dsv3", 8192), *LARGE]
PASSES = {"forward": "forward", "train": "forward, saving", "backward": "backward"}
DRAM = {"dram_read_gb": bool}
GB = {"column": "dram_read_gb", "form": ".1f"}


def gemms(file: str) -> str:
    rows = {
        f"{label}, {name}": {"file": file, "direction": direction, **row, **DRAM}
        for label, row in token_rows(CASES).items()
        for direction, name in PASSES.items()
    }
    return pivot(
        "model, tokens, pass",
        rows,
        {
            "layer us": MEGA,
            "GEMMs us": GEMMS,
            "speed": (GEMMS, MEGA),
            "layer GB": {**MEGA, **GB},
            "GEMMs GB": {**GEMMS, **GB},
        },
    )


@cache
def modelled(name: str, tokens: int) -> float:
    """Return GB that a model of the L2 cache says of a forward pass."""
    local = replace(SHAPES[name], num_experts=SHAPES[name].num_experts // 4)
    return predict_bytes(
        local, "bf16", rows_of_experts(local, tokens, 1), Meet(), Machine()
    ).read_gb


def dram() -> str:
    rows = []
    for label, row in token_rows(CASES).items():
        ncu = mean(H100, "dram_read_gb", direction="forward", **MEGA, **row, **DRAM)
        rows.append([label, f"{modelled(**row):.1f}", f"{ncu:.1f}"])
    return table(origin(H100), ["model, tokens", "model GB", "ncu GB"], rows)


def over_bf16(name: str, tree: str = "here") -> float:
    """Return the speed of a training step in FP8, weight gradients in e4m3, over a tree's in BF16."""
    where = {"file": E4M3, "name": name}
    parts = ("fp8", "bf16", "train"), ("fp8", "e4m3", "all")
    ours = sum(
        mean(**where, tree="here", precision=p, weight_gradients=w, direction=d)
        for p, w, d in parts
    )
    theirs = {"tree": tree, "precision": "bf16", "weight_gradients": ""}
    return sum(mean(**where, **theirs, direction=d) for d in ("train", "all")) / ours


def e4m3_weights() -> str:
    """Return speeds with weight gradients in e4m3: of backward, and of a step, a forward that saves and backward."""

    def backward(name: str, tree: str, weights: str) -> float:
        where = {"name": name, "tree": tree, "precision": "fp8", "weight_gradients": weights}
        return mean(E4M3, direction="all", **where)

    rows = []
    for name, model in MODELS.items():
        new = backward(name, "here", "e4m3")
        speeds = (
            backward(name, "base", "") / new,
            backward(name, "here", "bf16") / new,
            over_bf16(name, "base"),
            over_bf16(name),
        )
        rows.append([model, *(f"{speed:.2f}x" for speed in speeds)])
    head = ["model", "backward over dac9b21's", "over BF16 operands'", "step over dac9b21's BF16"]
    return table(origin(E4M3), [*head, "over this commit's BF16"], rows)


LOOPED = {"file": LOOP, "precision": "fp8"}
_BEFORE: dict[str, Any] = {"tree": "base"}
_AFTER: dict[str, Any] = {"tree": lambda tree: tree != "base"}
_PASSES: dict[str, dict[str, Any]] = {
    "backward": {"direction": "backward all"},
    "without weights": {"direction": "backward rows"},
    "forward, 8 tokens": {"part": "few", "tokens": 8},
    "64": {"part": "few", "tokens": 64},
    "8,192": {"part": "large", "direction": "forward"},
}
ONE_GPU: dict[str, Callable[[], str]] = {
    "few": few_tokens,
    "e4m3": e4m3_weights,
    "loop": partial(
        pivot,
        "model, GPU",
        {
            f"{model}, {gpu}": {"name": name, "gpu": gpu, **LOOPED}
            for gpu in ("H200", "H100")
            for name, model in MODELS.items()
        },
        {label: (where | _BEFORE, where | _AFTER) for label, where in _PASSES.items()},
    ),
    "one-gpu": partial(
        pivot,
        "model",
        model_rows(**LOCAL),
        {
            **{f"FP8 {t:,}": {"precision": "fp8", "tokens": t} for t in TOKENS},
            **{f"BF16 {t:,}": {"precision": "bf16", "tokens": t} for t in (8, 512, 8192)},
            **{
                f"floor {t}": ({**FLOOR, "tokens": t}, {"precision": "fp8", "tokens": t})
                for t in (8, 64)
            },
        },
    ),
    "fp8-gemms": partial(
        pivot,
        "model",
        model_rows(tokens=8192),
        {
            "one GPU: `fp8`": {**LOCAL, "precision": "fp8"},
            "`fp8_channel`": {**LOCAL, "precision": "fp8_channel"},
            "GEMMs": {**LOCAL, **GEMMS, "precision": "fp8_channel"},
            "four GPUs: `fp8`": {**FP8, **forward_of(8192)},
            "GEMMs ": {**GEMMS, "precision": "fp8_channel", **forward_of(8192)},
        },
    ),
    "gemms-h100": partial(gemms, H100),
    "gemms-h200": partial(gemms, H200),
    "dram": dram,
    "passes": partial(
        pivot,
        "model",
        {
            f"{MODELS[m]} {kind['precision'].upper()}, {gpu}": {"name": m, "file": file, **kind}
            for file, gpu in ((H200, "H200"), (H100, "H100"))
            for m in ("dsv3", "qwen3-30b")
            for kind in (BF16, FP8)
        },
        {
            label + of: {"gradients": gradients + of}
            for gradients, label in (("bf16", "bf16"), ("main_grad", "fp32"))
            for of in ("", " of 1", " of 2", " of 4")
        },
        {H100: "2026-11-26-0198aff", H200: "2026-11-28-2621ad8"},
        tokens=4096,
        direction="backward",
        dram_read_gb="",
    ),
}


# --- training and host ---


def final_loss(backend: str) -> float:
    return statistics.mean(values(HF, "loss", backend=backend)[-20:])


def tokens_per_s(backend: str) -> float:
    """Return those of the median step behind the first three."""
    seconds, tokens = (values(HF, c, backend=backend)[3:] for c in ("seconds", "tokens"))
    return statistics.median(t / s for t, s in zip(tokens, seconds, strict=True))


def gain() -> float:
    return tokens_per_s("megamoe") / tokens_per_s("grouped_mm")


def loss_gap() -> float:
    return 100 * (final_loss("megamoe") / final_loss("grouped_mm") - 1)


def transformers() -> str:
    rows = [
        [label, f"{tokens_per_s(b):,.0f}", f"{final_loss(b):.4f}"]
        for b, label in (("megamoe", "megamoe"), ("grouped_mm", "transformers' grouped_mm"))
    ]
    made = table(origin(HF), ["experts", "tokens/s", "final loss"], rows)
    said = f"megamoe is {gain():.2f}x faster. Its loss is {loss_gap():.1f} % higher, by chance (next table)."
    return f"{made}\n\n{said}"


def apart() -> tuple[float, float]:
    """Return how far losses of four seeds are apart in %, in the mean, and the standard error of that."""
    ours, theirs = (values(PRINTED, "value", of=of) for of in ("megamoe", "transformers"))
    average, error = paired(ours, theirs)
    return 100 * average, 100 * error


def seeds() -> str:
    average, error = apart()
    said = f"megamoe's loss differs by {average:.2f} % in the mean, with a standard error of {error:.2f} %."
    return f"{printed('seeds', 'seed')}\n\n{said}"


def printed(of: str, first: str) -> str:
    """Return a table of figures that a tool prints and writes to no file."""
    found = [r for r in lines(PRINTED) if r["table"] == of]
    cases, columns = (list(dict.fromkeys(r[k] for r in found)) for k in ("case", "of"))
    cells = {(r["case"], r["of"]): r["value"] for r in found}
    rows = [[case, *(cells.get((case, column), "") for column in columns)] for case in cases]
    return table(origin(PRINTED), [first, *columns], rows)


TRAINING: dict[str, Callable[[], str]] = {
    "transformers": transformers,
    "seeds": seeds,
    "curves": partial(printed, "curves", "run"),
    "trial": partial(printed, "trial", "run"),
    "host": partial(printed, "host", "call"),
}


# --- several hosts ---


def traffic() -> str:
    s, hosts = SHAPES["dsv3"], 2
    share = (hosts - 1) / hosts
    experts = s.num_experts / 8 * 3 * s.hidden * s.intermediate * 2 / 1e9
    gathered = 6 * s.top_k * share * 2 * s.hidden * 8192 / 1e9
    by_rail = [predict(s, p, 8192, hosts, Fabric()) for p in ("bf16", "fp8")]
    bf16, fp8 = (2 * (p.out_mb + p.back_mb) / 1e3 for p in by_rail)  # backward as much as forward
    ddp, fsdp = (
        f"{2 * share * experts:.1f} GB per step",
        f"{3 * share * experts:.1f} GB per micro-step",
    )
    rows = [
        ["EP inside, DDP across", "`2 (N-1)/N` x gradients, once per step", ddp, "all"],
        ["EP inside, FSDP across", "`3 (N-1)/N` x weights, per micro-step", fsdp, "1/N"],
        [
            "EP across, `staged`",
            "`6 K (N-1)/N` rows of 2H bytes per token",
            f"{gathered:.1f} GB per micro-step",
            "1/N",
        ],
        [
            "EP across, `mega`",
            "`4 d` rows per token",
            f"{bf16:.2f} GB, in FP8 {fp8:.2f}, per micro-step",
            "1/N",
        ],
    ]
    return table(
        "Computed by `bench/hosts/model.py`:",
        ["experts", "crosses hosts", "example", "memory"],
        rows,
    )


def plan() -> str:
    rows = []
    for name, precision, hosts in (
        *(("dsv3", "fp8", 2), ("dsv3", "fp8", 4), ("dsv3", "bf16", 2)),
        *(("qwen3-235b", "fp8", 2), ("qwen3-235b", "fp8", 4)),
    ):
        p = predict(SHAPES[name], precision, 8192, hosts, Fabric())
        times = [f"{t:,.0f}" for t in (p.launch, p.wire, p.two_level, p.staged_wire)]
        sizes = [f"{p.out_mb:.1f}", f"{p.back_mb:.1f}", f"{p.state_gib:.2f}"]
        rows.append([f"{MODELS[name]} {precision.upper()}", str(hosts), *sizes, *times])
    head = ["layer", "hosts", "MB out", "MB back", "state GiB"]
    head += ["launch us", "wire us", "layer us", "`staged` us"]
    return table("Computed by `bench/hosts/model.py`:", head, rows)


HOSTS: dict[str, Callable[[], str]] = {
    "traffic": traffic,
    "plan": plan,
    "spin": partial(
        pivot,
        "layer",
        token_rows((m, t) for m in ("dsv3", "qwen3-235b") for t in (8192, 1024, 128)),
        {
            "wire": {"column": "wire", "exchange": "static"},
            "launches": {"column": "launches", "exchange": "static"},
            "`exact`": {"column": "layer", "exchange": "exact"},
            "`exact`, model": {"column": "model", "exchange": "exact"},
            "`static`, a graph": {"column": "replay", "exchange": "static"},
            "`static`, model": {"column": "model", "exchange": "static"},
        },
        file=SPUN,
    ),
    "fake-hosts": partial(
        pivot,
        "layer",
        model_rows("dsv3", "qwen3-235b", file=EP4, tokens=8192),
        {
            f"{way}: {label}": {"run": run, **kind}
            for run, way in (("sweep_hosts", "NVLink"), ("sweep_hosts_sockets", "sockets"))
            for label, kind in (("FP8", FP8), ("BF16", BF16), ("`staged` BF16", STAGED))
        },
    ),
}


# --- FP4, operators, rounding ---

_CASES = {  # sizes -> cases, as tools/ops_bench.py names both
    "": ("gpt-oss forward", "gpt-oss step"),
    "family": ("product", "dgrad", "wgrad", "swiglu", "dswiglu", "geglu", "dgeglu", "srelu", "dsrelu", "mlp forward",
               "mlp backward", "fp8 quantize", "fp8 product", "fp8 dgrad", "fp8 swiglu", "channel", "fp8 mlp forward",
               "fp8 mlp backward"),
    "torchao": ("fp8 product", "fp8 dgrad", "fp8 swiglu"),
    "quickstart": ("swiglu", "dswiglu", "mlp forward", "mlp backward", "fp8 product", "fp8 mlp forward",
                   "fp8 mlp backward", "cute forward", "cute backward"),
}  # fmt: skip
OPERATORS = {f"{case}, {s}" if s else case: (s, case) for s, of in _CASES.items() for case in of}
TORCH, MEGAMOE = {"contender": "torch"}, {"contender": "megamoe"}
GRADIENTS = {"dx": "dx", "topk_weights": "d_topk_weights", "dW13": "dw13", "dW2": "dw2"}


def rounding(file: str, first: str, results: Mapping[str, str]) -> str:
    """Return the least and the largest relative error of results, by precision and ranks."""
    rows = []
    for label, column in results.items():
        row = [label]
        for precision in ("bf16", "fp8"):
            for ranks in (1, 2):
                found = values(file, f"{column}_fp32", precision=precision, ranks=ranks)
                row.append(f"{min(found):.2e} to {max(found):.2e}".replace("e-0", "e-"))
        rows.append(row)
    head = [first, "BF16, one rank", "two ranks", "FP8, one rank", "two ranks"]
    return table(origin(file), head, rows)


def models() -> str:
    rows = []
    for name, label in MODELS.items():
        s = SHAPES[name]
        sizes = s.hidden, s.intermediate, s.num_experts, s.top_k
        rows.append([label, *(f"{size:,}" for size in sizes)])
    return table(
        "From `megamoe/testing/shapes.py`:",
        ["model", "hidden", "intermediate", "experts", "top-k"],
        rows,
    )


# --- README ---


def speed() -> str:
    """Return about six figures: speed-ups over what one would use otherwise."""
    many = span(over_deepgemm(m, t) for m in MODELS for t in (1024, 8192))
    few = [over_deepgemm(m, t, r) for m in MODELS for t in (8, 64) for r in (1, 2, 4)]
    few += [over_deepgemm(m, 512) for m in MODELS]
    whole = [span((over_nccl(m, 8192, kind) for m in MODELS), ".1f") for kind in (BF16, FP8)]
    ours = [mean(file=EP4, run="step", **kind) for kind in (BF16, FP8 | BY_E4M3)]
    steps = [mean(file=EP4, run="step", **STAGED) / us for us in ours]
    quantizing = [
        mean(EP2, **of, **STEP, **BF16) / mean(EP2, **of, **STEP, **FP8)
        for of in token_rows(TWO_GPUS).values()
    ]
    nccl, deepgemm = "NCCL all-to-all + `torch._grouped_mm`, BF16", "DeepGEMM's inference kernel"
    rows = [
        ["forward, 8,192 tokens per GPU", nccl, *whole],
        ["forward, 1,024 and 8,192 tokens per GPU", deepgemm, "", many],
        ["forward, 8 to 512 tokens per GPU, one to four H200", deepgemm, "", span(few)],
        ["training step of Qwen3-30B's layer", nccl, *(f"{x:.1f}x" for x in steps)],
        ["training a Qwen3-MoE, tokens/s", "transformers' own experts", f"{gain():.2f}x", ""],
        [
            "training step without quantizing, one H200",
            "megamoe in BF16",
            "",
            span(over_bf16(m) for m in MODELS),
        ],
        ["training step with quantizing, two H200", "megamoe in BF16", "", span(quantizing)],
    ]
    average, error = apart()
    fp8 = {r["of"]: r["value"] for r in lines(PRINTED) if r["case"] == "mega fp8-e4m3"}
    note = f"""The Qwen3-MoE (107 M parameters, 300 steps, one seed) ended with a loss {loss_gap():.1f} % above that of
        transformers' own experts. Four more seeds on one H200 at commit dac9b21 showed that this was chance: there the
        losses differ by {average:.2f} %, with a standard error of {error:.2f} %. A small model's loss in FP8 differs
        from BF16's by {fp8["difference, %"]} % (standard error {fp8["standard error, %"]} %, {fp8["seeds"]} seeds, one
        H200, 2026-11-29). Quantizing: of the experts' weights, once per optimizer step; with DeepSeek-V4-Flash and
        4,096 tokens it takes longer than FP8 saves."""
    above = f"""2026-11-28, commit 5067e49; a Qwen3-MoE 2026-11-26, 0198aff; last rows ca7e45d and 2026-11-29,
        0f47660. {OLDER[4]} {OLDER[2]}"""
    made = table(above, ["what", "compared with", "BF16", "FP8"], rows)
    return f"{made}\n\n{wrapped(note)}"


DRAWN = (8, 512, 1024, 8192)
TITLE = "How much faster megamoe is: forward pass on four H200, by model and tokens per GPU (higher is better)"


def speedups() -> dict[str, dict[str, dict[str, float]]]:
    """Return the bars of README's picture: by what it is compared with, by model, by tokens."""
    of: dict[str, Callable[[str, int], float]] = {
        "over NCCL all-to-all + grouped_mm, BF16": over_nccl,
        "over DeepGEMM's inference kernel, FP8": over_deepgemm,
    }
    return {
        title: {label: {f"{t:,}": round(x(m, t), 2) for t in DRAWN} for m, label in MODELS.items()}
        for title, x in of.items()
    }


PARTS: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"speed": speed},
    "measurements.md": {"models": models, **FOUR_GPUS, **ONE_GPU, **TRAINING},
    "hosts.md": HOSTS,
    "fp4.md": {
        "fp4": partial(
            pivot,
            "model, tokens",
            token_rows((m, t) for m in ("dsv3", "flash") for t in (8, 64, 8192)),
            {
                f"`{p}`": {"precision": p}
                for p in ("fp8", "fp8xmxfp4", "bf16", "bf16xmxfp4", "bf16xnvfp4")
            },
            file=FP4,
            direction="forward",
        ),
        "frozen": partial(
            pivot,
            "model, rows per expert",
            {
                "GPT-OSS-120B, 512": {"name": "gpt-oss-120b", "tokens": 4096},
                "GPT-OSS-120B, 1,024": {"name": "gpt-oss-120b", "tokens": 8192},
                "DeepSeek-V3, 1,024": {"name": "dsv3", "tokens": 8192},
            },
            {
                **{f"`{p}`": {"precision": p} for p in ("bf16", "bf16xmxfp4", "fp8xmxfp4", "fp8")},
                "`fp8`, made": {"precision": "fp8", "gradients": "none, transposes made"},
                "`bf16xmxfp4` / `bf16`": ({"precision": "bf16xmxfp4"}, {"precision": "bf16"}),
            },
            runs={FP4: "2026-11-28-919eb42"},
            file=FP4,
            mode="cool",
            direction="backward",
            gradients="none",
        ),
        "packed": partial(printed, "packed", "training"),
        "decode": partial(printed, "decode", "generation"),
    },
    "ops.md": {
        "operators": partial(
            pivot,
            "operator",
            {
                label: {"case": case, "sizes": sizes, "file": OPS, "mode": "cool"}
                for label, (sizes, case) in OPERATORS.items()
            },
            {
                "megamoe": MEGAMOE,
                "torch": TORCH,
                "speed-up": (TORCH, MEGAMOE),
            },
        )
    },
    "numerics.md": {
        "rounding": partial(rounding, FORWARD, "result", {"y": "y"}),
        "gradients": partial(rounding, BACKWARD, "gradient", GRADIENTS),
        "recipes": partial(printed, "recipes", "run"),
    },
    "training.md": {n: partial(printed, n, "experts") for n in ("wide", "parts")},
    "serving.md": {"placement": partial(printed, "placement", "Qwen3-235B, BF16")},
}
