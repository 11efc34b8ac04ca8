"""Provide torch.compiler.disable without importing torch._dynamo, which takes 0.4 s (2026-11-23)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def uncompiled(reason: str) -> Callable[[F], F]:
    """Exclude a function from torch.compile, as torch.compiler.disable(reason=reason) does.

    torch.compiler.disable is applied at the first call at which torch._dynamo is loaded.
    """

    def decorate(function: F) -> F:
        made: list[Callable[..., Any]] = []

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if "torch._dynamo" not in sys.modules:
                return function(*args, **kwargs)
            if not made:
                made.append(torch.compiler.disable(function, reason=reason))
            return made[0](*args, **kwargs)

        # What a tracer looks for: without these it breaks the graph a frame further in, in other words.
        marked: Any = call
        marked._torchdynamo_disable, marked._torchdynamo_disable_msg = True, reason
        return marked

    return decorate
