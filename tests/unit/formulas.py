"""Formulas of activations in the type of their input, for fp64 autograd: they judge the oracle, and megamoe.ops."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megamoe.core.config import Activation


def activate(activation: Activation, gate_up: Tensor) -> Tensor:
    """gate_up: [..., P*I] -> h [..., I]: Activation.__call__ in another type."""
    if activation.kind == "relu2":
        return F.relu(gate_up).square()
    gate, up = gate_up.chunk(2, dim=-1)
    if activation.kind == "swiglu":
        return F.silu(gate) * up
    if activation.kind == "clamped_swiglu":
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
        return gate * torch.sigmoid(activation.alpha * gate) * (up + activation.up_offset)
    return F.gelu(gate, approximate="tanh" if activation.kind == "geglu_tanh" else "none") * up
