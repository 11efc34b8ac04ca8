#!/usr/bin/env python3
"""Print the requirements of setup.py that this Python lacks, one per line, for tools/setup_env.sh on GPU machines.

    python tools/missing.py runtime    what the kernel needs; install without dependencies, since torch is installed
    python tools/missing.py dev        what tests and linting need in addition

It imports nothing that might be missing.
"""

from command import parser_of

from bench.requirements import MISSING


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("what", choices=MISSING)
    print("\n".join(MISSING[parser.parse_args().what]()))


if __name__ == "__main__":
    main()
