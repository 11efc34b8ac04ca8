#!/usr/bin/env python3
"""Loss curves of the demo in several precisions and backends; on its own, draws a CSV of them again:

python tools/demo_curves.py curves.csv        to curves.png
"""

import sys
from pathlib import Path

from command import parser_of

from bench.demo.curves import draw_again


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("csv", type=Path)
    return draw_again(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
