#!/usr/bin/env python3
"""Draw the results of tools/latency_sweep.py. From its CSVs: python tools/sweep_plot.py --out x.png *.csv"""

import sys
from pathlib import Path

from command import parser_of

from bench.plot import draw_again


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("csv", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True, metavar="PNG")
    return draw_again(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
