"""Every environment variable in one table. They are read when asked for, not at import."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from megamoe.core.errors import ConfigError


@dataclass(frozen=True)
class Variable:
    """One environment variable: its name, its default as text, what it means."""

    name: str
    default: str
    meaning: str
    choices: tuple[str, ...] = ()

    def get(self) -> str:
        """Return the value, or the default when unset or empty."""
        value = os.environ.get(self.name) or self.default
        if self.choices and value not in self.choices:
            raise ConfigError(self.name, repr(value), "one of " + ", ".join(self.choices))
        return value

    def number(self, lowest: float, highest: float) -> float:
        """Return the value as a number from `lowest` to `highest`."""
        return number(self.name, self.get(), lowest, highest)


def number(name: str, given: object, lowest: float, highest: float) -> float:
    """Return what was given as a number. Raises ConfigError unless it is one from `lowest` to `highest`."""
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
        Variable("MEGAMOE_CACHE_DIR", "~/.cache/megamoe", "where compiled kernels are kept"),
        Variable(
            "MEGAMOE_PREBUILT",
            "",
            "kernels of `python -m megamoe.jit --export`; empty: package `megamoe_prebuilt`",
        ),
        Variable(
            "MEGAMOE_BACKEND",
            "auto",
            'what backend="auto" means',
            ("auto", "mega", "staged", "emulate", "reference"),
        ),
        Variable(
            "MEGAMOE_TIMEOUT_S",
            "120",
            "longest wait inside the kernel, and for ranks of other hosts, in seconds",
        ),
        Variable("MEGAMOE_RESERVE_SMS", "", "SMs left to others; empty: see `reserve_sms`"),
        Variable(
            "MEGAMOE_LOG", "warning", "log level", ("debug", "info", "warning", "error", "critical")
        ),
        Variable(
            "MEGAMOE_TRANSPORT",
            "auto",
            "what the window is made of",
            ("auto", "symm_mem", "nvshmem"),
        ),
        Variable("MEGAMOE_HOST", "", "the host that a rank is on; empty: machine's name and boot"),
        Variable("MEGAMOE_SHARE_GPUS", "0", "1: ranks of tests may share a GPU", ("0", "1")),
    )
}


def cache_dir() -> Path:
    """Return the folder of compiled kernels; it may not exist yet."""
    return Path(TABLE["MEGAMOE_CACHE_DIR"].get()).expanduser()


def prebuilt_dir() -> Path | None:
    """Return the stated folder of prebuilt kernels; None when unset."""
    stated = TABLE["MEGAMOE_PREBUILT"].get()
    return Path(stated).expanduser() if stated else None


def backend() -> str:
    """Return the backend that stands for "auto"."""
    return TABLE["MEGAMOE_BACKEND"].get()


def timeout_s(stated: float | None = None) -> float:
    """Return the longest wait inside the kernel or for another host, in seconds: of an option, where it is given.

    The kernel counts nanoseconds in 64 bits; 1e9 seconds are 31 years.
    """
    limits = 0.001, 1e9
    if stated is None:
        return TABLE["MEGAMOE_TIMEOUT_S"].number(*limits)
    return number("timeout_s", stated, *limits)


def reserve_sms() -> int | None:
    """Return the number of SMs left to others; None when unset."""
    if not TABLE["MEGAMOE_RESERVE_SMS"].get():
        return None
    return int(TABLE["MEGAMOE_RESERVE_SMS"].number(0, 10_000))


def log_level() -> str:
    """Return the log level in the spelling of the logging module."""
    return TABLE["MEGAMOE_LOG"].get().upper()


def transport() -> str:
    """Return "auto", "symm_mem" or "nvshmem"."""
    return TABLE["MEGAMOE_TRANSPORT"].get()


def host() -> str:
    """Return the name that this rank's host was given, or nothing."""
    return TABLE["MEGAMOE_HOST"].get()


def share_gpus() -> bool:
    """Return whether several ranks may share a GPU, in its time slices: right, slow, and without NCCL."""
    return TABLE["MEGAMOE_SHARE_GPUS"].get() == "1"
