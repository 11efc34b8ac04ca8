#!/usr/bin/env python3
"""Time two trees alternately on the same GPUs: this one and one from before a change.

    git worktree add /tmp/base HEAD~
    python tools/compare_trees.py --base /tmp/base --rounds 3 -- --shape qwen3-30b --precision fp8 --tokens 8 64 8192

Arguments after `--` are passed to each tree's own tools/latency_sweep.py. Compare only figures of one run: two GPUs of
one kind differ by 3 to 5 %, and one GPU differs as much from hour to hour. Prints each tree's median over the rounds
and the change. Writes OUT/compare.csv and the tables of the sweeps.
"""

import sys
from pathlib import Path

from command import parser_of

from bench.compare_trees import SWEEP, compare


def main() -> int:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--base", type=Path, required=True, help="folder of the old tree")
    add("--rounds", type=int, default=2)
    add("--out", type=Path, default=Path("out/compare"))
    add("sweep", nargs="+", help="after --: arguments of latency_sweep.py")
    args = parser.parse_args()
    if not (args.base / SWEEP).is_file():
        parser.error(f"--base {args.base}: no tree with {SWEEP}")
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: at least 1")
    return compare(args)


if __name__ == "__main__":
    sys.exit(main())
