"""Cases of tools/train_hf.py --wide and tools/train_packed.py: whose experts compute, and how; arguments of --wide.

It imports no transformers.
"""

import argparse
from typing import Any

from bench.demo.screen import LAYERS

# Options of megamoe's adapter; None: transformers' own experts.
CASES: dict[str, dict[str, Any] | None] = {
    "own": None,
    **LAYERS,
    "fp8-e4m3-made": LAYERS["fp8-e4m3"] | {"transposes": "made"},
}
LABELS = {
    "own": "transformers' own",
    "bf16": "BF16",
    "fp8": "FP8",
    "fp8-e4m3": "FP8 e4m3",
    "fp8-e4m3-made": "FP8 e4m3, transposes made",
}
# Of tools/train_packed.py, likewise.
PACKED: dict[str, dict[str, Any] | None] = {
    "packed": {"precision": "bf16xmxfp4"},
    "packed-fp8": {"precision": "fp8xmxfp4"},
    "bf16": {"precision": "bf16"},
    "own": None,
}


def add_wide_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --cases, and --wide and what it alone reads."""
    cases = "only train these, with every seed, and compare their losses; with --wide: default all"
    parser.add_argument("--cases", nargs="+", choices=CASES, help=cases)
    window = "last steps whose mean is compared between --cases; default: 50"
    parser.add_argument("--window", type=int, default=50, help=window)
    group = parser.add_argument_group("a model of Qwen3-30B's width on one GPU, in several cases")
    add = group.add_argument
    add("--wide", action="store_true", help="train it; --curves names the CSVs, without a picture")
    add("--masters", choices=("bf16", "fp32"), default="bf16", help="what AdamW holds")
    add("--layers", type=int, help="default: 12, with fp32 masters 8")
    add("--compile", action="store_true", help="torch.compile attention, norms, routers and loss")
