"""Read the weights and the activation of a transformers experts module.

A module has `gate_up_proj` (`up_proj` without a gate) and `down_proj`, each one tensor for all experts, and flags for
their layout. They are read by their strides, with gate and up rows interleaved or not. Calls copy transposed weights
(GPT-OSS) unless relayout() has moved them, and float types except bf16 and an FP8 layer's fp32. FP8 weights are read in
place with their scales. Of packed FP4 weights only scales and frozen biases are copied, once.

The activation is not looked up by its name. It is the one of megamoe that gives the same results as the module's own,
so a module with another activation raises an error instead of computing something else.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megamoe.adapters.library_activations import candidates, matching
from megamoe.adapters.library_parameters import in_turn, weights_from
from megamoe.core.config import Activation
from megamoe.core.errors import ConfigError
from megamoe.core.table import SCALE_GROUP
from megamoe.formats.fp4 import read_biases
from megamoe.formats.weights import BF16_MASTERS, ExpertWeights

_LIMITS, _ALPHAS = ("limit", "swiglu_limit"), ("alpha", "swiglu_alpha")  # as modules name them
FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
_SCALES = "_scale_inv"  # behind the names of what they scale
_PACKED = (torch.int8, torch.uint8, torch.float4_e2m1fn_x2)
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def precisions_of(module: Any) -> tuple[str, ...]:
    """Return the precisions that compute with the weights as they are stored, none for floats: those are masters.

    Raises ConfigError for a module whose weights no layer reads.
    """
    _check(module)
    dtype = matrices_of(module)[0].dtype
    if dtype in _PACKED:
        names = "fp8xmxfp4", "bf16xmxfp4"
        # transformers quantizes rows next to DeepSeek-V4's experts, and none next to GPT-OSS's.
        return names if hasattr(module, "activation_scheme") else names[::-1]
    if dtype == torch.float8_e4m3fn:
        return ("fp8",)
    if dtype not in FLOATS:
        expected = f"{', '.join(map(str, FLOATS))}, torch.float8_e4m3fn or packed e2m1"
        raise ConfigError("experts' dtype", dtype, expected)
    return ()


def weights_of(module: Any, masters: tuple[torch.dtype, ...] = BF16_MASTERS) -> ExpertWeights:
    """Return a module's experts as a layer takes them: views wherever their memory can be read as it lies.

    masters: float types that are not cast. Only floats get gradients. Raises ConfigError for what no layer reads.
    """
    if not precisions_of(module):
        return _masters(module, masters)
    return _mxfp4(module) if matrices_of(module)[0].dtype in _PACKED else _fp8(module)


def matrices_of(module: Any, end: str = "") -> tuple[Tensor, Tensor]:
    """Return the first and the second projection as the module stores them, or what has this end behind their names."""
    first = "gate_up_proj" if module.has_gate else "up_proj"
    return getattr(module, first + end), getattr(module, "down_proj" + end)


def _masters(module: Any, masters: tuple[torch.dtype, ...]) -> ExpertWeights:
    given = matrices_of(module)
    w13, w2 = (w if w.dtype in masters else w.bfloat16() for w in given)
    b13, b2 = _biases(module) or (None, None)
    if module.is_transposed:
        w13, w2 = w13.transpose(1, 2).contiguous(), w2.transpose(1, 2).contiguous()
    if module.has_gate and not module.is_concatenated:  # rows g0, u0, g1, u1, ...
        w13, b13 = in_turn(w13), None if b13 is None else in_turn(b13)
    return weights_from((w13, w2), [[p] for p in given], (b13, b2), masters)


def _biases(module: Any) -> tuple[Tensor, Tensor] | None:
    return matrices_of(module, "_bias") if module.has_bias else None


def _fp8(module: Any) -> ExpertWeights:
    """e4m3 with a scale for each 128 x 128, of fp32 or a power of two."""
    _check_quantized(module)
    w13, w2 = (w.detach() for w in matrices_of(module))
    block = getattr(module, "block_size", None)
    if block is None or tuple(block) != (SCALE_GROUP, SCALE_GROUP):
        raise ConfigError("weight_block_size", block, f"[{SCALE_GROUP}, {SCALE_GROUP}]")
    # A block that held gate and up rows would have one scale for both.
    if module.has_gate and w2.shape[-1] % SCALE_GROUP:
        raise ConfigError(
            "intermediate size", w2.shape[-1], f"a multiple of {SCALE_GROUP} in FP8 checkpoints"
        )
    s13, s2 = (s.detach().float() for s in matrices_of(module, _SCALES))
    return ExpertWeights(w13, w2, w13_scale=s13, w2_scale=s2)


# Sources, their versions, and what was made of them.
arranged: WeakKeyDictionary[nn.Module, tuple[list[Tensor], list[int], ExpertWeights]] = (
    WeakKeyDictionary()
)


@torch.compiler.disable(reason="the order of FP4 scales is changed outside of the graph")
def _mxfp4(module: Any) -> ExpertWeights:
    """Two e2m1 a byte and a power of two for each 32 along K, whose order is changed once for each version of them."""
    _check_quantized(module)
    kind: dict[str, Any] = {
        "planes": 1 + module.has_gate,
        "interleaved": not module.is_concatenated,
    }
    matrices, biases = [*matrices_of(module), *matrices_of(module, _SCALES)], _biases(module)
    if biases and torch.is_grad_enabled() and any(b.requires_grad for b in biases):
        b13, b2 = read_biases(biases, **kind)
        return replace(_arranged(module, matrices, None, kind), b13=b13, b2=b2)
    return _arranged(module, matrices, biases, kind)


def _arranged(
    module: Any, matrices: list[Tensor], biases: tuple[Tensor, Tensor] | None, kind: dict[str, Any]
) -> ExpertWeights:
    """Return weights without gradients, made anew only after a tensor changed."""
    given = [t.detach() for t in (*matrices, *(biases or ()))]
    versions = [-1 if t.is_inference() else t._version for t in given]
    sources, known, weights = arranged.get(module, ([], [], None))
    same = [t.data_ptr() for t in sources] == [t.data_ptr() for t in given]
    if weights is None or not same or known != versions:
        with torch.no_grad():
            weights = ExpertWeights.from_mxfp4(*given[:4], biases=biases, **kind)
        # Holding `given` keeps their addresses from becoming another tensor's.
        arranged[module] = (given, versions, weights)
    return weights


def _check_quantized(module: Any) -> None:
    scheme = getattr(module, "activation_scheme", "dynamic")
    if scheme != "dynamic":
        raise ConfigError("activation_scheme", repr(scheme), "'dynamic': a layer scales x itself")
    packed = matrices_of(module)[0].dtype in _PACKED
    if module.is_transposed or not packed and (module.has_bias or not module.is_concatenated):
        expected = "[E, N, K]" if packed else "no biases; [E, N, K]; gate, then up"
        kind = f"{type(module).__name__} in {'FP4' if packed else 'FP8'}"
        raise ConfigError("experts", kind, expected)


def _check(module: Any) -> None:
    """Raise ConfigError for what a layer does not compute."""
    kind = type(module).__name__
    for name in FLAGS:
        if not hasattr(module, name):
            raise ConfigError("experts", f"{kind} without {name}", "experts of transformers")
    if getattr(module, "has_post_expert_norm", False):
        raise ConfigError("experts", kind, "no norm behind each expert")
    matrix = getattr(module, "gate_up_proj" if module.has_gate else "up_proj", None)
    if not isinstance(matrix, Tensor) or matrix.dim() != 3:
        raise ConfigError(
            "experts", kind, "parameters of all experts in one tensor of 3 dimensions"
        )
    if isinstance(matrix, DTensor):
        raise ConfigError("experts", f"{kind} of DTensors", "tensors of this rank")


def formula_of(module: Any) -> tuple[Any, ...]:
    """Return what a module's activation follows from: another one needs another layer."""
    names = (*FLAGS, *_LIMITS, *_ALPHAS, "act_fn")
    return tuple(getattr(module, name, None) for name in names)


@torch.no_grad()
def activation_of(module: Any) -> Activation:
    """Return the activation that gives what the module's own gate gives. Raises ConfigError where none does."""

    def gate(columns: Tensor) -> Tensor:
        if not module.has_gate:
            return module.act_fn(columns)
        if not module.is_concatenated:
            columns = columns.unflatten(1, (2, -1)).transpose(1, 2).flatten(1)
        return module._apply_gate(columns)

    limits, alphas = (
        [v for v in (getattr(module, name, None) for name in names) if v is not None]
        for names in (_LIMITS, _ALPHAS)
    )
    device = next(module.parameters()).device
    return matching(
        gate, candidates(module.has_gate, limits, alphas), type(module).__name__, device
    )
