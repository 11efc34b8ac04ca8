"""The activation policies of the kernel, number by number, against fp64: what docs/numerics.md says of them."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megamoe.config import ACTIVATIONS, Activation
from megamoe.jit import abi, host
from megamoe.jit.source import ACTIVATIONS as POLICIES

ULP = 2.0**-24
SOURCE = """\
#include "megamoe/act/policies.h"

#define POLICY(name)                                                                             \\
    extern "C" __attribute__((visibility("default"))) void name(                                 \\
        const megamoe::Args* args, const float* gate, const float* up, float* out, int count) {  \\
        for (int i = 0; i < count; ++i) out[i] = megamoe::name::apply(*args, gate[i], up[i]);    \\
    }
"""


@pytest.fixture(scope="module")
def library() -> Any:
    lines = [f"POLICY({policy})" for policy in POLICIES.values()]
    return ctypes.CDLL(str(host.build_source(SOURCE + "\n".join(lines) + "\n")))


def applied(library: Any, activation: Activation, gate: Tensor, up: Tensor) -> Tensor:
    args = abi.aligned(abi.Args)
    args.act_alpha, args.act_limit = activation.alpha, activation.limit
    args.act_up_offset = activation.up_offset
    out = torch.empty_like(gate)
    function = getattr(library, POLICIES[activation.kind])
    addresses = [ctypes.c_void_p(t.data_ptr()) for t in (gate, up, out)]
    function(ctypes.c_void_p(ctypes.addressof(args)), *addresses, gate.numel())
    return out


def grid() -> tuple[Tensor, Tensor]:
    gate = torch.cat([torch.linspace(-12, 12, 48001), torch.tensor([0.0, -0.0, 1e-20, -1e-20])])
    return gate, torch.linspace(-9, 9, gate.numel())


@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_policies_compute_what_torch_does(library: Any, name: str) -> None:
    """Within fp32's noise of the torch twin, so that neither has another form or another constant."""
    gate, up = grid()
    activation = ACTIVATIONS[name]
    found = applied(library, activation, gate if activation.gated else up, up)
    if not activation.gated:
        found = applied(library, activation, up, up)
    both = torch.stack([gate, up], dim=1) if activation.gated else up[:, None]
    expected = activation(both.double().float()).flatten()
    error = (found - expected).abs().max().item()
    assert error < 9 * 12 * 2e-7, f"{name}: {error:.1e}"


def gelu_tanh(gate: Tensor) -> tuple[Tensor, Tensor]:
    """Return (2 u, gelu) in fp64, without cancellation."""
    gate = gate.double()
    twice_u = 2 * math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    return twice_u, gate * torch.sigmoid(twice_u)


def test_gelu_by_tanh_is_accurate_in_relative_terms(library: Any) -> None:
    gate, _ = grid()
    ones = torch.ones_like(gate)
    twice_u, expected = gelu_tanh(gate)
    limit = (8 + 4 * twice_u.abs()) * ULP
    counts = (expected.abs() > 1e-30) & (twice_u.abs() < 80)  # further left exp leaves fp32

    def too_far(found: Tensor) -> int:
        error = (found.double() - expected).abs() / expected.abs()
        return int((error > limit)[counts].sum())

    assert too_far(applied(library, ACTIVATIONS["geglu_tanh"], gate, ones)) == 0
    # the exact form, and tanh with its cancellation, are not it
    assert too_far(applied(library, ACTIVATIONS["geglu"], gate, ones)) > 1000
    assert too_far(ACTIVATIONS["geglu_tanh"](torch.stack([gate, ones], dim=1)).flatten()) > 1000


def test_gelu_by_erf_is_accurate_in_absolute_terms(library: Any) -> None:
    gate, _ = grid()
    gate = gate[gate.abs() > 1e-3]
    phi = 0.5 * torch.erfc(-gate.double() / math.sqrt(2))

    def error(name: str) -> float:
        found = applied(library, ACTIVATIONS[name], gate, torch.ones_like(gate))
        return (found.double() / gate - phi).abs().max().item()

    assert error("geglu") < 1e-7 + 3 * ULP
    assert error("geglu_tanh") > 1e-4  # the other form is not it
