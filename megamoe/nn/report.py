"""Report how much GPU memory a layer takes."""

from __future__ import annotations

from typing import Any

from megamoe.backends.select import operands_of
from megamoe.core.config import Problem
from megamoe.core.errors import ConfigError
from megamoe.experts.shards import local_part
from megamoe.launch import layout
from megamoe.layer.layer import Layer
from megamoe.nn.module import MegaMoE


def memory_report(of: Problem | Layer | MegaMoE, pool_rows: int | None = None) -> dict[str, Any]:
    """Return the bytes that "mega" allocates on this rank in addition to weights; print(report["text"]) shows them.

    Args:
        of: A layer, or the problem of a future layer. Over several hosts: an open layer.
        pool_rows: The option of that name. Default: that of the layer, or the default.

    Returns:
        A dict. Inference: window_bytes (symmetric memory; layers may share a window), workspace_bytes (layers of equal
        sizes that share a window share it), state_bytes (per call), pool_rows, worst_pool_rows (no launch needs more),
        regions (name -> bytes), copies_bytes (quantized weights with scales; 0 in BF16), and masters_bytes, of a
        MegaMoE its w13 and w2. Training, 0 if the precision does not train: backward_bytes (a second workspace, shared
        alike), train_state_bytes (per call that waits for its backward pass), train_state_used_bytes (the part used at
        an even load), train_state_worst_bytes (with a pool for one pass), stash_bytes (with delay_wgrad="keep", per
        pass that waits for backward_dw(), in place of its state), transposes_bytes (of the copies; with
        transposes="made" once per device), training_regions. The same as "text" and, in short, as "line".

    Raises:
        ConfigError: `of` is something else.
        WorkspaceTooSmall: pool_rows is too small.
    """
    if isinstance(of, Problem):
        return layout.memory_report(of, pool_rows, operands_of(of, None))
    layer = of if isinstance(of, Layer) else getattr(of, "_layer", None)
    if not isinstance(layer, Layer):
        raise ConfigError("of", type(of).__name__, "a Problem, a Layer or a MegaMoE")
    rows = layer.pool_rows if pool_rows is None else pool_rows
    operands = operands_of(layer.problem, layer.options.weight_gradients)
    found = layout.memory_report(layer.window_problem, rows, operands)
    if isinstance(of, MegaMoE):
        found["masters_bytes"] = sum(local_part(w)[0].nbytes for w in (of.w13, of.w2))
        found["text"] += f"\nw13 and w2          {found['masters_bytes'] / 2**20:>10.1f} MiB"
    return found
