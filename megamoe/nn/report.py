"""What a layer takes of a GPU's memory."""

from __future__ import annotations

from typing import Any

from megamoe.core.config import Problem
from megamoe.core.errors import ConfigError
from megamoe.launch import layout
from megamoe.layer.layer import Layer
from megamoe.nn.module import MegaMoE


def memory_report(of: Problem | Layer | MegaMoE, pool_rows: int | None = None) -> dict[str, Any]:
    """Return the bytes that "mega" allocates on this rank beside weights; `print(report["text"])` shows them.

    of: a layer, or the problem of one that is still to be made; over several hosts a layer that is open.
    pool_rows: as the option of that name; None: what the layer has, or the default.
    Returns window_bytes (symmetric memory; layers may share one window), workspace_bytes (layers of equal sizes that
    share a window share that too), pool_rows, worst_pool_rows (no launch needs more), regions (name -> bytes), and the
    same as "text" and in one "line". Of training backward_bytes (a workspace that layers share likewise),
    train_state_bytes (each call whose backward is to come keeps so many), train_state_used_bytes (of these, at an even
    load), train_state_worst_bytes (with a pool that holds every launch in one pass), training_regions: 0 and empty for
    precisions that do not train.
    Raises ConfigError for something else, and WorkspaceTooSmall for too few pool_rows.
    """
    if isinstance(of, Problem):
        return layout.memory_report(of, pool_rows)
    layer = of if isinstance(of, Layer) else getattr(of, "_layer", None)
    if not isinstance(layer, Layer):
        raise ConfigError("of", type(of).__name__, "a Problem, a Layer or a MegaMoE")
    return layout.memory_report(
        layer.window_problem, layer.pool_rows if pool_rows is None else pool_rows
    )
