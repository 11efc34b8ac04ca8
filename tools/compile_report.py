#!/usr/bin/env python3
"""Compile every kernel variant, without a GPU, and check the result.

    python tools/compile_report.py [--only fp8] [--profile] [--sass out/before]
    python tools/compile_report.py --against out/before     after a change: show what differs

`bytes` is the size of the kernel, `epilogue` and `loop` the size of the longest one that a tile runs. Exit code 1 if a
kernel spills, has a stack frame or an epilogue over 42 KB, or lacks its tensor-core or TMA instructions; if ptxas
serialized its WGMMAs; or if the compiler's log has no figures.
"""

import sys
from pathlib import Path

from command import parser_of

from bench.compile_report import read_figures, report


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--only", default="", help="only variants whose name contains this")
    parser.add_argument(
        "--profile", action="store_true", help="compile the variants with timestamps"
    )
    parser.add_argument(
        "--roles", action="store_true", help="also print the bytes of each warp role"
    )
    parser.add_argument("--sass", type=Path, help="folder to write cubins and disassembly to")
    parser.add_argument("--against", type=Path, help="folder of --sass from before a change")
    args, before = parser.parse_args(), {}
    if args.against:
        try:
            before = read_figures(args.against)
        except OSError as error:
            parser.error(f"--against {args.against}: {error}; made by --sass {args.against}")
    return report(args, before)


if __name__ == "__main__":
    sys.exit(main())
