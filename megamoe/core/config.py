"""Problem and Activation: what is computed. Every constraint is stated here, once."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from math import inf, isfinite
from typing import Any

import torch
import torch.nn.functional as F

from megamoe.core.errors import MAX_RANKS, ConfigError
from megamoe.core.table import PRECISIONS, REFUSED, Precision

MAX_TOP_K = 32  # a lane each: max_top_k in csrc/megamoe/cta/smem.h
MAX_WIDTH = 16384  # of hidden and intermediate
MAX_LOCAL_EXPERTS = 1024
# Index * 32 + k and two mark bits share 32 bits. The index counts whole chunks of 32 tokens of every rank.
MAX_GROUP_TOKENS, CHUNK_TOKENS = 1 << 25, 32
KINDS = ("swiglu", "clamped_swiglu", "geglu", "geglu_tanh", "relu2")
_GELU = {"geglu": "none", "geglu_tanh": "tanh"}  # kind -> torch's name of the form


@dataclass(frozen=True)
class Activation:
    """The function between the two GEMMs; `kind` picks the kernel's policy, the rest its numbers.

    swiglu          silu(gate) * up
    clamped_swiglu  g * sigmoid(alpha * g) * (u + up_offset), g = min(gate, limit), u = clamp(up, +-limit)
    geglu           gelu(gate) * up, the exact (erf) form
    geglu_tanh      the same by tanh (gelu_pytorch_tanh)
    relu2           relu(v) ** 2, not gated: w13 has one plane
    """

    kind: str
    alpha: float = 1.0
    limit: float = inf
    up_offset: float = 0.0

    def __post_init__(self) -> None:
        for name in ("alpha", "limit", "up_offset"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)):
                raise ConfigError(f"activation.{name}", repr(value), "a number")
            # ints too, so that equal means same fingerprint
            object.__setattr__(self, name, float(value))
        if not isinstance(self.kind, str) or self.kind not in KINDS:
            raise ConfigError("activation.kind", repr(self.kind), "one of " + ", ".join(KINDS))
        if not (isfinite(self.alpha) and isfinite(self.up_offset)):
            raise ConfigError("activation", self, "finite alpha and up_offset")
        if not self.limit > 0:
            raise ConfigError("activation.limit", self.limit, "a positive number")
        numbers = (self.alpha, self.limit, self.up_offset)
        if self.kind != "clamped_swiglu" and numbers != (1, inf, 0):
            raise ConfigError("activation", self, f"no alpha, limit or up_offset for {self.kind}")

    @property
    def gated(self) -> bool:
        """Whether w13 has two planes (gate rows, then up rows) or one."""
        return self.kind != "relu2"

    @property
    def planes(self) -> int:
        """Planes of w13: 2 gated, 1 not."""
        return 2 if self.gated else 1

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up: [..., P*I], any float type -> h [..., I] fp32; differentiable."""
        gate_up = gate_up.float()
        if not self.gated:
            return F.relu(gate_up).square()
        gate, up = gate_up.chunk(2, dim=-1)
        if self.kind in _GELU:
            return F.gelu(gate, approximate=_GELU[self.kind]) * up
        if self.kind == "swiglu":
            return F.silu(gate) * up
        gate = gate.clamp(max=self.limit)
        up = up.clamp(min=-self.limit, max=self.limit)
        return gate * torch.sigmoid(self.alpha * gate) * (up + self.up_offset)


ACTIVATIONS: dict[str, Activation] = {
    "swiglu": Activation("swiglu"),
    "swiglu_oai": Activation("clamped_swiglu", alpha=1.702, limit=7.0, up_offset=1.0),
    "geglu": Activation("geglu"),
    "geglu_tanh": Activation("geglu_tanh"),
    "relu2": Activation("relu2"),
}


def activation_by_name(name: str | Activation) -> Activation:
    """Return the named activation; an Activation is handed through. Raises ConfigError for unknown names."""
    if isinstance(name, Activation):
        return name
    if not isinstance(name, str) or name not in ACTIVATIONS:
        expected = "one of " + ", ".join(ACTIVATIONS) + ", or an Activation"
        raise ConfigError("activation", repr(name), expected)
    return ACTIVATIONS[name]


_SIZES = ("hidden", "intermediate", "num_experts", "top_k", "ep_size", "rank", "max_tokens")


@dataclass(frozen=True)
class Problem:
    """One MoE layer, equal on every rank of the group except for `rank`.

    Raises ConfigError that names every violated constraint.
    """

    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    ep_size: int = 1
    rank: int = 0
    max_tokens: int = 8192
    precision: str = "bf16"
    activation: Activation = ACTIVATIONS["swiglu"]
    bias: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "activation", activation_by_name(self.activation))
        if problems := self.problems():
            raise ConfigError("; ".join(problems))

    def problems(self) -> list[str]:
        """Return every violated constraint as "name is value, expected ..."; empty means valid."""
        return [
            f"{name} is {value!r}, expected {expected}"
            for name, value, ok, expected in self._constraints()
            if not ok
        ]

    def _constraints(self) -> Iterator[tuple[str, Any, bool, str]]:
        if not isinstance(self.precision, str):
            yield "precision", self.precision, False, " or ".join(PRECISIONS)
            return
        for name in _SIZES:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                yield name, value, False, "an int"
                return
        for name in ("hidden", "intermediate"):
            value = getattr(self, name)
            known = PRECISIONS.get(self.precision)
            unit = 16 if known is None else known.multiple
            ok = 0 < value <= MAX_WIDTH and value % unit == 0
            yield name, value, ok, f"a multiple of {unit} in {unit}..{MAX_WIDTH}"
        yield "top_k", self.top_k, 1 <= self.top_k <= MAX_TOP_K, f"1..{MAX_TOP_K}"
        yield "ep_size", self.ep_size, self.ep_size >= 1, "at least 1"
        ep_size = max(self.ep_size, 1)
        yield "rank", self.rank, 0 <= self.rank < ep_size, f"0..{ep_size - 1}"
        ok = 1 <= self.num_experts <= MAX_LOCAL_EXPERTS * ep_size
        expected = f"1..{MAX_LOCAL_EXPERTS} for each of {ep_size} ranks"
        yield "num_experts", self.num_experts, ok, expected
        yield "max_tokens", self.max_tokens, 1 <= self.max_tokens < 1 << 31, f"1..{(1 << 31) - 1}"
        expected = REFUSED.get(self.precision, " or ".join(PRECISIONS))
        yield "precision", self.precision, self.precision in PRECISIONS, expected
        yield "bias", self.bias, isinstance(self.bias, bool), "a bool"

    def why_no_window(self) -> str | None:
        """Return why the kernel's window, and so "mega" and "emulate", cannot have this problem, or None."""
        if self.ep_size > MAX_RANKS:
            return f"ep_size is {self.ep_size}, expected 1..{MAX_RANKS} for the kernel's window"
        highest = MAX_GROUP_TOKENS // (CHUNK_TOKENS * self.ep_size) * CHUNK_TOKENS
        if self.max_tokens > highest:
            return f"max_tokens is {self.max_tokens}, expected 1..{highest} for the kernel's window"
        return None

    @property
    def formats(self) -> Precision:
        """How x, the weights and h are stored."""
        return PRECISIONS[self.precision]

    def _shares(self) -> tuple[int, int]:
        # divmod() would do, but torch.compile does not trace it where sizes differ between layers.
        return self.num_experts // self.ep_size, self.num_experts % self.ep_size

    def expert_begin(self, rank: int | None = None) -> int:
        """Return the first global expert of a rank (default: this one)."""
        rank = self.rank if rank is None else rank
        base, extra = self._shares()
        return rank * base + min(rank, extra)

    def num_local_experts(self, rank: int | None = None) -> int:
        """Return L of a rank (default: this one); the first E % R ranks hold one more."""
        rank = self.rank if rank is None else rank
        return self.expert_begin(rank + 1) - self.expert_begin(rank)

    def rank_of_expert(self, expert: int) -> int:
        """Return the rank that holds a global expert."""
        if not 0 <= expert < self.num_experts:
            raise ConfigError("expert", expert, f"0..{self.num_experts - 1}")
        base, extra = self._shares()
        with_extra = extra * (base + 1)
        if expert < with_extra:
            return expert // (base + 1)
        return extra + (expert - with_extra) // base

    def fingerprint(self) -> int:
        """Return a 32-bit hash of everything but `rank`, stable over processes and machines."""
        act = self.activation
        skip = ("rank", "activation")
        values = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if f.name not in skip]
        values.append(f"activation={act.kind},{act.alpha!r},{act.limit!r},{act.up_offset!r}")
        return zlib.crc32(";".join(values).encode())
