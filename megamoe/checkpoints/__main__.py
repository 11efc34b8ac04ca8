"""Convert a checkpoint's experts to another layout: `python -m megamoe.checkpoints SOURCE TARGET --to megamoe`."""

from __future__ import annotations

import argparse
import sys

from megamoe.checkpoints.conversion import convert
from megamoe.checkpoints.layouts import LAYOUTS
from megamoe.core.errors import MegaMoEError


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Return 1 if the checkpoint is rejected or an error occurs."""
    parser = argparse.ArgumentParser(prog="python -m megamoe.checkpoints", description=__doc__)
    parser.add_argument("source", help="a folder of safetensors, with or without an index")
    parser.add_argument("target", help="the folder to make")
    parser.add_argument("--to", required=True, choices=LAYOUTS)
    said = "the source's layout, where names and shapes do not say it"
    parser.add_argument("--from", dest="source_layout", choices=LAYOUTS, help=said)
    said = "leave out calibrated input scales: layers give each token its own"
    parser.add_argument("--dynamic-activations", action="store_true", help=said)
    parser.add_argument("--shard-gb", type=float, default=5.0, help="size of a file at most")
    chosen = parser.parse_args(arguments)
    try:
        done = convert(
            chosen.source,
            chosen.target,
            chosen.to,
            source_layout=chosen.source_layout,
            dynamic_activations=chosen.dynamic_activations,
            shard_bytes=int(chosen.shard_gb * 10**9),
            progress=True,
        )
    except (MegaMoEError, OSError) as error:
        print(f"megamoe.checkpoints: {error}", file=sys.stderr)
        return 1
    print(*done, f"{chosen.target}: {chosen.to}", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
