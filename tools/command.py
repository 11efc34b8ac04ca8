"""Provide what every command of this folder needs: a parser, and the checkout on sys.path for `bench` and `megamoe`.

So a command runs from a checkout without an installation. Only commands import this module.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def parser_of(page: str | None) -> argparse.ArgumentParser:
    """Return a parser whose --help begins with the docstring of a command, line by line."""
    form = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=page, formatter_class=form)


def at_least(least: float, kind: type = int) -> Callable[[str], float]:
    """Return the type of an argument: a number of this kind, from `least` on."""

    def number(text: str) -> float:
        value: float = kind(text)
        if not value >= least:
            raise argparse.ArgumentTypeError(f"{text}: expected a number from {least} on")
        return value

    return number
