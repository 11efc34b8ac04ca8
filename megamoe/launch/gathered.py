"""Let FSDP2 gather an FP8 layer's experts as e4m3 and scales instead of masters.

 master shard [L/R]  ->  e4m3, scales [L/R]  ->  all-gather  ->  e4m3, scales [L]  ->  the layer's launches
 fp32 or bf16            once per version        half the bytes  freed by FSDP2        gradients in the master's type

A shard is whole experts, so its blocks of 128 x 128 are those of all experts. FSDP2 calls fsdp_pre_all_gather() and
fsdp_post_all_gather() where a shard has them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from megamoe.core.errors import ArgumentError
from megamoe.core.table import Format
from megamoe.launch.cache import QuantizedCache
from megamoe.launch.passes import Pair

_VIEWS = {getattr(torch.ops.aten, n).default for n in ("detach", "alias", "as_strided", "view")}


class Gathered(torch.Tensor):
    """Stand for a parameter of all local experts that FSDP2 gathered in e4m3. It has a size and no values."""

    pair: Pair

    @staticmethod
    def __new__(cls, pair: Pair, dtype: torch.dtype) -> Gathered:
        """pair: e4m3 [L, P*I, H] and its scales. dtype: of the masters."""
        q, _ = pair
        made: Gathered = torch.Tensor._make_wrapper_subclass(
            cls, q.shape, dtype=dtype, device=q.device
        )
        made.pair = pair
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's has no types
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _VIEWS:
            return cls(args[0].pair, args[0].dtype)
        expected = "reshard() before it is read: FSDP2 gathered e4m3 numbers (gathers='e4m3')"
        raise ArgumentError("a gathered parameter", f"used by {func}", expected)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # torch's has no types
        return f"Gathered({list(self.shape)}, {self.dtype})"


class _Stand(torch.autograd.Function):
    """Return a plain tensor that stands for a Gathered one in a call: its size and type, at the address of the e4m3.

    Its rows overlap, and nobody reads them. FSDP2 may free and move the e4m3 as it does parameters.
    """

    @staticmethod
    def forward(ctx: Any, w: Gathered) -> Tensor:
        q, step = w.pair[0], 16 // w.dtype.itemsize  # legal strides
        return q.flatten().view(w.dtype).as_strided(w.shape, (step, step, 1)).detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


def plain(w: Tensor) -> Tensor:
    """Return what a call takes for a parameter: the parameter, or a plain tensor for a Gathered one."""
    if not isinstance(w, Gathered):
        return w
    stand: Any = _Stand.apply(w)
    stand._megamoe_gathered = w.pair
    return stand


class Shards:
    """Quantize a layer's shards where FSDP2 gathers them."""

    def __init__(self, stored: Format, planes: dict[str, int]) -> None:
        """planes: of each parameter that is gathered."""
        self.cache, self._stored, self._planes = QuantizedCache(), stored, planes

    def attach(self, module: Any) -> None:
        """Attach FSDP2's hooks to a module's shards. Raise ArgumentError if FSDP2 would not call them."""
        from torch.distributed.fsdp import fully_shard

        state: Any = fully_shard.state(module)  # type: ignore[attr-defined]
        if state is None:
            found = "'e4m3' with fully_shard() of a module around the layer"
            raise ArgumentError("gathers", found, "'masters', or fully_shard(layer) before")
        for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
            for of in group.fsdp_params:
                name = of._module_info.param_name
                ranks = of.mesh_info.shard_mesh_size
                own = of._module_info.module is module and name in self._planes
                if not own or ranks == 1:  # of one rank nothing is gathered
                    continue
                local = getattr(module, name)._local_tensor
                if of.offload_to_cpu or of._orig_size[0] % ranks:
                    value = "CPU offloading, or ranks that do not divide the layer's experts"
                    raise ArgumentError("gathers", f"'e4m3' with {value}", "'masters'")
                local.fsdp_pre_all_gather = partial(self._before, name, local)
                local.fsdp_post_all_gather = partial(self._behind, name)
                of._init_extensions()

    def _before(self, name: str, local: Tensor, mesh: Any) -> tuple[Any, None]:
        with torch.no_grad():
            return self.cache.get(name, local, self._planes[name], self._stored), None

    def _behind(
        self, name: str, outputs: Any, _: None, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        q, scale = outputs
        if out is None:  # launches keep the address of scales; that of e4m3 is checked in each call
            return Gathered((q, scale.clone()), dtype), ()
        out = out.to_local() if hasattr(out, "to_local") else out
        out.pair[1].copy_(scale)
        return None
