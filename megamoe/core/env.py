"""Define every environment variable in one table. A variable is read when it is used, not at import."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from megamoe.core.errors import ConfigError


@dataclass(frozen=True)
class Variable:
    """Describe one environment variable: name, default as text, meaning, and allowed values if they are few."""

    name: str
    default: str
    meaning: str
    choices: tuple[str, ...] = ()


def number(name: str, given: object, lowest: float, highest: float) -> float:
    """Convert an option to a number. Raise ConfigError unless it is between `lowest` and `highest`."""
    try:
        value = float(given)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        value = float("nan")
    if not lowest <= value <= highest:
        raise ConfigError(name, repr(given), f"a number from {lowest:g} to {highest:g}")
    return value


TABLE: dict[str, Variable] = {
    v.name: v
    for v in (
        Variable("MEGAMOE_CACHE_DIR", "~/.cache/megamoe", "folder of compiled kernels"),
        Variable(
            "MEGAMOE_PREBUILT",
            "",
            "folder written by `python -m megamoe.jit --export`; empty: package `megamoe_prebuilt`",
        ),
        Variable(
            "MEGAMOE_BACKEND",
            "auto",
            'what `backend="auto"` selects',
            ("auto", "mega", "staged", "emulate", "reference"),
        ),
        Variable(
            "MEGAMOE_TIMEOUT_S",
            "120",
            "longest wait in seconds, inside the kernel and for ranks of other hosts",
        ),
        Variable("MEGAMOE_RESERVE_SMS", "", "SMs left to other kernels; empty: see `reserve_sms`"),
        Variable(
            "MEGAMOE_LOG", "warning", "log level", ("debug", "info", "warning", "error", "critical")
        ),
        Variable(
            "MEGAMOE_TRANSPORT",
            "auto",
            "allocator of the symmetric window",
            ("auto", "symm_mem", "nvshmem"),
        ),
        Variable(
            "MEGAMOE_HOST", "", "name of this rank's host; empty: the machine's name and boot id"
        ),
        Variable(
            "MEGAMOE_SHARE_GPUS", "0", "1: several ranks may share one GPU, for tests", ("0", "1")
        ),
    )
}


def get(name: str) -> str:
    """Return a variable of TABLE, its default if it is unset or empty. Raise ConfigError if it is not in `choices`."""
    variable = TABLE[name]
    value = os.environ.get(name) or variable.default
    if variable.choices and value not in variable.choices:
        raise ConfigError(name, repr(value), "one of " + ", ".join(variable.choices))
    return value


def cache_dir() -> Path:
    """Return the folder of compiled kernels. It may not exist yet."""
    return Path(get("MEGAMOE_CACHE_DIR")).expanduser()


def timeout_s(stated: float | None = None) -> float:
    """Return the longest wait, in seconds, inside the kernel or for another host.

    The option `stated` wins over the environment variable. The kernel counts nanoseconds in 64 bits, and the upper
    limit of 1e9 seconds is 31 years.
    """
    if stated is None:
        return number("MEGAMOE_TIMEOUT_S", get("MEGAMOE_TIMEOUT_S"), 0.001, 1e9)
    return number("timeout_s", stated, 0.001, 1e9)


def reserve_sms() -> int | None:
    """Return the number of SMs to leave to other kernels, None if it is not set."""
    stated = get("MEGAMOE_RESERVE_SMS")
    return int(number("MEGAMOE_RESERVE_SMS", stated, 0, 10_000)) if stated else None


def share_gpus() -> bool:
    """Return True if several ranks may share one GPU. Results are correct, but slow, and NCCL is not available."""
    return get("MEGAMOE_SHARE_GPUS") == "1"
