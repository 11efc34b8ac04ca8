#!/usr/bin/env python3
"""Compile every kernel variant (no GPU needed) and look at the result: is it what we think it is?

    python tools/compile_report.py [--only fp8] [--profile] [--sass out/before]
    python tools/compile_report.py --against out/before     after a change: what has moved since then

`bytes` are of the kernel, `epilogue` and `loop` of the longest that a tile runs. Exit code 1 when a kernel spills, has
a stack frame or an epilogue longer than 42 KB, lacks its tensor-core or TMA instructions, when ptxas serialised its
WGMMAs, or when the compiler's log has no figures.
"""

import sys
from pathlib import Path

from command import parser_of

from bench.compile_report import read_figures, report


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--only", default="", help="variants whose name contains this")
    parser.add_argument("--profile", action="store_true", help="the variants with time stamps")
    parser.add_argument("--roles", action="store_true", help="bytes of each role of warps, too")
    parser.add_argument("--sass", type=Path, help="folder to keep cubins and disassembly in")
    parser.add_argument("--against", type=Path, help="such a folder, from before a change")
    args, before = parser.parse_args(), {}
    if args.against:
        try:
            before = read_figures(args.against)
        except OSError as error:
            parser.error(f"--against {args.against}: {error}; made by --sass {args.against}")
    return report(args, before)


if __name__ == "__main__":
    sys.exit(main())
