#!/usr/bin/env python3
"""Write the generated parts of README.md (environment variables, options of the backends) and of docs/api.md.

    python tools/gen_docs.py            rewrites what lies between the markers
    python tools/gen_docs.py --check    exit code 1 when a part is stale, and says which

A part stands between `<!-- NAME: begin ... -->` and `<!-- NAME: end -->`. Sources: megamoe/core/env.py, the
constructors of the backends in megamoe/backends/select.py, docstrings of what is public.
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
