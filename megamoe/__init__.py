"""megamoe: an expert-parallel mixture-of-experts layer in one persistent kernel on Hopper."""

import logging as _logging
from pathlib import Path as _Path

__version__ = "0.1.0"

# Run from the source tree, megamoe.jit is the folder next to this package; installed, it lies
# inside.
_root = _Path(__file__).resolve().parent.parent
if all((_root / name).exists() for name in ("jit/__init__.py", "csrc", "setup.py")):
    __path__.append(str(_root))

from megamoe.backends.options import Options  # noqa: E402
from megamoe.backends.statistics import Statistics  # noqa: E402
from megamoe.core import env as _env  # noqa: E402
from megamoe.core.config import Activation, Problem, activation_by_name  # noqa: E402
from megamoe.core.errors import (  # noqa: E402
    AbiMismatch,
    ArgumentError,
    CompileError,
    ConfigError,
    MegaMoEError,
    NotCoResident,
    PeerFault,
    ProtocolTimeout,
    RankMismatch,
    UnreachablePeer,
    WindowBroken,
    WorkspaceTooSmall,
)
from megamoe.experts.placement import ExpertPlacement  # noqa: E402
from megamoe.formats.versions import invalidate  # noqa: E402
from megamoe.formats.weights import ExpertWeights  # noqa: E402
from megamoe.layer.layer import Layer  # noqa: E402
from megamoe.layer.placed import PlacedLayer  # noqa: E402
from megamoe.nn.grouped_mlp import GroupedMLP  # noqa: E402
from megamoe.nn.module import MegaMoE  # noqa: E402
from megamoe.nn.report import memory_report  # noqa: E402
from megamoe.nn.shared_experts import SharedExperts  # noqa: E402
from megamoe.nn.training import (  # noqa: E402
    after_step,
    average_expert_gradients,
    clip_grad_norm_,
    grad_norm,
    ignore_experts_in_ddp,
    quantize_experts,
)

from megamoe import ops as ops  # noqa: E402  isort: skip

try:
    _logging.getLogger("megamoe").setLevel(_env.get("MEGAMOE_LOG").upper())
except ConfigError as _error:  # no reason to end a program, or a command with a traceback
    _logging.getLogger("megamoe").warning("%s; it is 'warning'", _error)

__all__ = [
    "AbiMismatch",
    "Activation",
    "ArgumentError",
    "CompileError",
    "ConfigError",
    "ExpertPlacement",
    "ExpertWeights",
    "GroupedMLP",
    "Layer",
    "MegaMoE",
    "MegaMoEError",
    "NotCoResident",
    "Options",
    "PeerFault",
    "PlacedLayer",
    "Problem",
    "ProtocolTimeout",
    "RankMismatch",
    "SharedExperts",
    "Statistics",
    "UnreachablePeer",
    "WindowBroken",
    "WorkspaceTooSmall",
    "__version__",
    "activation_by_name",
    "after_step",
    "average_expert_gradients",
    "clip_grad_norm_",
    "grad_norm",
    "ignore_experts_in_ddp",
    "invalidate",
    "memory_report",
    "quantize_experts",
]
