"""The activation policies of the kernel, number by number, against fp64: what docs/numerics.md says of them."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megamoe.core.config import ACTIVATIONS, Activation
from megamoe.jit import abi, host, paths
from megamoe.jit.source import ACTIVATIONS as POLICIES

ULP = 2.0**-24
SOURCE = """\
#include "megamoe/act/policies.cuh"

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


def args_of(activation: Activation) -> Any:
    args = abi.aligned(abi.Args)
    args.act_alpha, args.act_limit = activation.alpha, activation.limit
    args.act_up_offset = activation.up_offset
    return args


def applied(library: Any, activation: Activation, gate: Tensor, up: Tensor) -> Tensor:
    args = args_of(activation)
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


# --- gradients ---

GRADIENT = """\

#define GRADIENT(name)                                                                                  \\
    extern "C" __attribute__((visibility("default"))) void gradient_##name(                             \\
        const megamoe::Args* args, const float* gate, const float* up, const float* dh, float* dgate,   \\
        float* dup, float* h, int count) {                                                              \\
        for (int i = 0; i < count; ++i)                                                                 \\
            megamoe::name::gradient(*args, gate[i], up[i], dh[i], dgate[i], dup[i], h[i]);              \\
    }
"""
POLICIES_H = paths.CSRC / "megamoe" / "act" / "policies.cuh"


def gradient_library(*faults: tuple[str, str]) -> Any:
    header = POLICIES_H.read_text()
    for right, wrong in faults:
        assert right in header
        header = header.replace(right, wrong)
    lines = [f"GRADIENT({policy})" for policy in POLICIES.values()]
    return ctypes.CDLL(str(host.build_source(header + GRADIENT + "\n".join(lines) + "\n")))


@pytest.fixture(scope="module")
def gradients() -> Any:
    return gradient_library()


def applied_gradient(library: Any, activation: Activation, *inputs: Tensor) -> list[Tensor]:
    """inputs: gate, up, dh -> dgate, dup, h; ungated: up takes gate's place and dup dgate's, dup is left as 5.0."""
    out = [torch.full_like(inputs[0], 5.0) for _ in range(3)]
    addresses = [ctypes.c_void_p(t.data_ptr()) for t in (*inputs, *out)]
    function = getattr(library, f"gradient_{POLICIES[activation.kind]}")
    function(ctypes.c_void_p(ctypes.addressof(args_of(activation))), *addresses, inputs[0].numel())
    return out


def exact_gradient(activation: Activation, *inputs: Tensor) -> list[Tensor]:
    """The same by autograd in fp64."""
    gate, up = (t.double().requires_grad_() for t in inputs[:2])
    kind, limit = activation.kind, activation.limit
    if kind == "relu2":
        h = torch.relu(gate) ** 2 + 0 * up
    elif kind == "swiglu":
        h = gate * torch.sigmoid(gate) * up
    elif kind == "clamped_swiglu":
        g, u = gate.clamp(max=limit), up.clamp(-limit, limit)
        h = g * torch.sigmoid(activation.alpha * g) * (u + activation.up_offset)
    else:
        approximate = "tanh" if kind == "geglu_tanh" else "none"
        h = torch.nn.functional.gelu(gate, approximate=approximate) * up
    dgate, dup = torch.autograd.grad(h, (gate, up), inputs[2].double())
    return [dgate, dup, h.detach()]


def edges(activation: Activation, *more: float) -> tuple[Tensor, Tensor, Tensor]:
    """Every pair of edge values: limits exactly hit and just missed, zeros, subnormals, small, large."""
    limit = activation.limit if math.isfinite(activation.limit) else 6.0
    around = [limit, math.nextafter(limit, 9), limit - 2**-21, limit + 2**-21, 7.03125]
    magnitudes = [0.0, 1e-40, 1e-20, 1e-3, 0.5, 1.0, *around, 30.0, 87.0, 89.0, 104.0, 1e4, 1e13]
    values = torch.tensor([*magnitudes, *(-m for m in magnitudes), *more])
    gate, up = (t.flatten().contiguous() for t in torch.meshgrid(values, values, indexing="ij"))
    dh = torch.where(torch.arange(gate.numel()) % 3 == 0, -0.75, 1.0)
    return gate, up, dh


def too_far(activation: Activation, library: Any, *inputs: Tensor) -> int:
    """Numbers that miss the bound: 12 * 2^-24 of |dh u| (1 + |g|) for dgate, and of |dh g| and |g u| for dup and h.

    `g` and `u` are those behind the clamps, `u` with its offset. GeGlu's formula may add 1.5e-7 to the 12 * 2^-24.
    """
    found, exact = (
        applied_gradient(library, activation, *inputs),
        exact_gradient(activation, *inputs),
    )
    g, u, dh = (t.double() for t in inputs)
    if activation.kind == "relu2":
        scales = [2 * dh.abs() * g.abs(), torch.zeros_like(g), g**2]
        exact[1] = torch.full_like(g, 5.0)  # left alone
    else:
        g, u = g.clamp(max=activation.limit), u.clamp(-activation.limit, activation.limit)
        u = u + activation.up_offset
        scales = [(dh * u).abs() * (1 + g.abs()), (dh * g).abs(), (g * u).abs()]
    bound = 12 * ULP + (1.5e-7 if activation.kind == "geglu" else 0)
    least = 2.0**-125  # flushed
    return sum(
        int((~((f.double() - e).abs() <= bound * s + least * (1 + s))).sum())
        for f, e, s in zip(found, exact, scales, strict=True)
    )


@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_gradients_are_those_of_autograd(gradients: Any, name: str) -> None:
    activation, generator = ACTIVATIONS[name], torch.Generator().manual_seed(0)
    random = (3 * torch.randn(3, 200000, generator=generator)).bfloat16().float()
    gate, up = grid()
    for inputs in (tuple(random), (gate, up, torch.ones_like(up)), edges(activation)):
        assert too_far(activation, gradients, *inputs) == 0


@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_gradients_and_apply_have_the_same_h(library: Any, gradients: Any, name: str) -> None:
    """As far as fp32 goes: backward makes h from rounded pre-activations anyway."""
    gate, up = grid()
    if not ACTIVATIONS[name].gated:
        gate = up
    forward = applied(library, ACTIVATIONS[name], gate, up)
    backward = applied_gradient(gradients, ACTIVATIONS[name], gate, up, torch.ones_like(up))[2]
    assert (forward - backward).abs().max() < 9 * 12 * 2e-7


@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_gradients_at_infinity_and_nan(gradients: Any, name: str) -> None:
    """Infinite and NaN where autograd's are, and never a number for a NaN, but for a product's other factor."""
    activation, nan, inf = ACTIVATIONS[name], float("nan"), float("inf")
    gate, up, dh = edges(activation, inf, -inf, nan)
    kept = (gate != 0) & (up != 0)
    gate, up = gate[kept].contiguous(), up[kept].contiguous()
    dh = torch.ones_like(gate)
    if not activation.gated:
        dup, _, h = applied_gradient(gradients, activation, gate, up, dh)
        assert (dup.isnan() == gate.isnan()).all()
        assert (h.isnan() == gate.isnan()).all()
        assert (dup[gate == inf] == inf).all()
        assert (dup[gate == -inf] == 0).all()
        return
    dgate, dup, h = applied_gradient(gradients, activation, gate, up, dh)
    assert h[gate.isnan() | up.isnan()].isnan().all()
    assert dgate[gate.isnan() | up.isnan() & (gate <= activation.limit)].isnan().all()
    clamped = up.abs() > activation.limit
    assert dup[gate.isnan() & ~clamped].isnan().all()
    assert (dup[clamped] == 0).all()
    here = ~gate.isnan() & ~up.isnan()
    exact = exact_gradient(activation, gate[here], up[here], dh[here])
    for found, expected in zip((dgate[here], dup[here], h[here]), exact, strict=True):
        infinite = ~expected.float().isfinite()
        assert infinite.any()
        # where autograd has infinities, finite numbers must not stand; it may have been inf * 0 before
        assert (~found[infinite].isfinite()).all()
        more = ~found.isfinite() & ~infinite
        assert not more[gate[here].isfinite()].any()


FAULTS = {  # by policy, one of each at a time
    "swiglu_oai": [
        ("= gate > args.act_limit;", "= gate >= args.act_limit;"),
        ("= fabsf(up) > args.act_limit;", "= fabsf(up) >= args.act_limit;"),
        ("dgate = gate_clamped ? 0 : dgate;", ""),
        ("dup = up_clamped ? 0 : dup;", ""),
        ("s + args.act_alpha * f", "s + f"),
        ("copysignf(args.act_limit, up)", "args.act_limit"),
    ],
    "swiglu": [("s + f * (1.0f - s), up", "s + f * s, up")],
    "geglu": [("cdf + gate * phi", "cdf - gate * phi"), ("1994.59925f", "1990.f")],
    "geglu_tanh": [("3.0f * 0.0713548163f", "0.0713548163f")],
    "relu2": [("dup = dh * (r + r);", "dup = dh * r;"), ("h = r * r;", "h = up * up;")],
}


@pytest.mark.parametrize("i", range(max(map(len, FAULTS.values()))))
def test_wrong_gradients_are_caught(i: int) -> None:
    planted = {name: faults[i] for name, faults in FAULTS.items() if i < len(faults)}
    library = gradient_library(*planted.values())
    for name, activation in ACTIVATIONS.items():
        assert (too_far(activation, library, *edges(activation)) > 0) == (name in planted), name
