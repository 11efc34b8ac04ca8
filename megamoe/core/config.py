"""Define what a layer computes: `Problem` and `Activation`, with every constraint on them."""

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
GELU = {"geglu": "none", "geglu_tanh": "tanh"}  # kind -> torch's name of the form


@dataclass(frozen=True)
class Activation:
    """Define the function between the two GEMMs.

        swiglu          silu(gate) * up
        clamped_swiglu  g * sigmoid(alpha * g) * (u + up_offset), g = min(gate, limit), u = clamp(up, -limit, limit)
        geglu           gelu(gate) * up, the exact (erf) form
        geglu_tanh      gelu(gate) * up, the tanh approximation (gelu_pytorch_tanh)
        relu2           relu(v) ** 2, not gated: w13 has one plane

    Args:
        kind: One of the names above.
        alpha: Factor inside the sigmoid of `clamped_swiglu`. Default: 1.0.
        limit: Bound of gate and up in `clamped_swiglu`, positive. Default: no bound.
        up_offset: Added to up in `clamped_swiglu`. Default: 0.0.

    Raises:
        ConfigError: `kind` is unknown, a number is out of its range, or another kind than `clamped_swiglu` has numbers.
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
        """True if w13 has two planes, gate rows and then up rows."""
        return self.kind != "relu2"

    @property
    def planes(self) -> int:
        """Number of planes of w13: 2 if gated, else 1."""
        return 2 if self.gated else 1

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Apply the activation; differentiable.

        Args:
            gate_up: [..., P*I] pre-activations of any float type: gate columns, then up columns.

        Returns:
            h, [..., I] fp32.
        """
        gate_up = gate_up.float()
        if not self.gated:
            return F.relu(gate_up).square()
        gate, up = gate_up.chunk(2, dim=-1)
        if self.kind in GELU:
            return F.gelu(gate, approximate=GELU[self.kind]) * up
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
    """Look up an activation by its name.

    Args:
        name: "swiglu", "swiglu_oai" (GPT-OSS), "geglu", "geglu_tanh", "relu2", or an Activation, which is returned as
            is.

    Returns:
        The Activation.

    Raises:
        ConfigError: The name is unknown.
    """
    if isinstance(name, Activation):
        return name
    if not isinstance(name, str) or name not in ACTIVATIONS:
        expected = "one of " + ", ".join(ACTIVATIONS) + ", or an Activation"
        raise ConfigError("activation", repr(name), expected)
    return ACTIVATIONS[name]


_SIZES = ("hidden", "intermediate", "num_experts", "top_k", "ep_size", "rank", "max_tokens")


@dataclass(frozen=True)
class Problem:
    """Describe one MoE layer: its sizes, ranks and number formats. Every rank passes the same values, except `rank`.

    Args:
        hidden: H, the width of a token, at most 16384. A multiple of 16, with FP4 weights of 32.
        intermediate: I, the width of an expert's hidden layer. Same limits as `hidden`.
        num_experts: E, the experts of all ranks together, at most 1024 per rank.
        top_k: K, the experts per token, 1 to 32.
        ep_size: R, the number of expert-parallel ranks. Default: 1.
        rank: This rank, 0 to R - 1. Default: 0.
        max_tokens: Largest number of tokens per rank and call. It sizes the buffers. Default: 8192.
        precision: "bf16", "fp8", "fp8_channel", "fp8xmxfp4", "bf16xmxfp4" or "bf16xnvfp4". Default: "bf16".
        activation: An Activation or its name. Default: "swiglu".
        bias: True if the experts have biases b13 and b2. Default: False.

    Raises:
        ConfigError: A constraint is violated. The message lists every violation.
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
        violated = [
            f"{name} is {value!r}, expected {expected}"
            for name, value, ok, expected in self._constraints()
            if not ok
        ]
        if violated:
            raise ConfigError("; ".join(violated))

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
        """Explain why the backends "mega" and "emulate" cannot run this problem in one window.

        Returns:
            The violated limit, or None if the problem fits.
        """
        if self.ep_size > MAX_RANKS:
            return f"ep_size is {self.ep_size}, expected 1..{MAX_RANKS} for the kernel's window"
        highest = MAX_GROUP_TOKENS // (CHUNK_TOKENS * self.ep_size) * CHUNK_TOKENS
        if self.max_tokens > highest:
            return f"max_tokens is {self.max_tokens}, expected 1..{highest} for the kernel's window"
        return None

    @property
    def formats(self) -> Precision:
        """The storage formats of x, the weights and h."""
        return PRECISIONS[self.precision]

    def _shares(self) -> tuple[int, int]:
        # divmod() would do, but torch.compile does not trace it where sizes differ between layers.
        return self.num_experts // self.ep_size, self.num_experts % self.ep_size

    def expert_begin(self, rank: int | None = None) -> int:
        """Return the first global expert of a rank.

        Args:
            rank: The rank. Default: this rank.

        Returns:
            The number of the expert, 0 to E.
        """
        rank = self.rank if rank is None else rank
        base, extra = self._shares()
        return rank * base + min(rank, extra)

    def num_local_experts(self, rank: int | None = None) -> int:
        """Return the number of experts of a rank. The first E % R ranks hold one more.

        Args:
            rank: The rank. Default: this rank.

        Returns:
            L.
        """
        rank = self.rank if rank is None else rank
        return self.expert_begin(rank + 1) - self.expert_begin(rank)

    def rank_of_expert(self, expert: int) -> int:
        """Return the rank that holds a global expert.

        Args:
            expert: Number of the expert, 0 to E - 1.

        Returns:
            The rank.

        Raises:
            ConfigError: There is no such expert.
        """
        if not 0 <= expert < self.num_experts:
            raise ConfigError("expert", expert, f"0..{self.num_experts - 1}")
        base, extra = self._shares()
        with_extra = extra * (base + 1)
        if expert < with_extra:
            return expert // (base + 1)
        return extra + (expert - with_extra) // base

    def fingerprint(self) -> int:
        """Hash everything except `rank`. The hash is equal in all processes and on all machines.

        Returns:
            A 32-bit integer.
        """
        act = self.activation
        skip = ("rank", "activation")
        values = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if f.name not in skip]
        values.append(f"activation={act.kind},{act.alpha!r},{act.limit!r},{act.up_offset!r}")
        return zlib.crc32(";".join(values).encode())
