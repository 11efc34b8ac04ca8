#!/usr/bin/env python3
"""Write the generated parts of README.md and docs/, and draw README's picture.

    python tools/gen_docs.py            rewrite what is between the markers
    python tools/gen_docs.py --check    change nothing; exit code 1 if a part is stale, with its name

A part is between `<!-- NAME: begin ... -->` and `<!-- NAME: end -->`. Sources: measured figures from the CSVs of
docs/measurements/ (bench/figures.py); environment variables from megamoe/core/env.py; options from the constructors of
the backends; docs/api.md from the public docstrings.
"""

import sys
from pathlib import Path

from command import parser_of

from bench.documents import FILES, write


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing")
    parser.add_argument("--file", type=Path, nargs="+", default=FILES)
    args = parser.parse_args()
    return write(args.file, args.check)


if __name__ == "__main__":
    sys.exit(main())
