"""vLLM (0.33): MoE layers in BF16 and FP8 (128x128 blocks, or by channel and token) through megamoe layers.

    VLLM_PLUGINS=megamoe vllm serve Qwen/Qwen3-30B-A3B --data-parallel-size 8 --enable-expert-parallel

Dispatch, experts and combine are one call over the expert-parallel group, in the place of vLLM's experts and of what it
prepares and finalizes around them (vllm_experts.py). Routers, shared experts, loading and the experts' parameters stay
vLLM's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import vllm.model_executor.layers.fused_moe.modular_kernel as mk
import vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method as unquantized
import vllm.model_executor.layers.quantization.fp8 as fp8
from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w8a8_fp8 as compressed_fp8,
)

from megamoe.adapters.library_layer import check
from megamoe.adapters.library_patches import Patches, found
from megamoe.adapters.vllm_experts import Experts, Layers, PrepareAndFinalize
from megamoe.core.errors import ConfigError


class Installed:
    """What install() has set, and the layers since."""

    def __init__(self, layers: Layers) -> None:
        self.layers = layers

    def close(self) -> None:
        """Free what the layers hold; calls make them anew. Collective."""
        self.layers.close()

    def uninstall(self) -> None:
        """Give vLLM its experts back, for layers that are made from then on."""
        _patches.undo()


_patches = Patches()


def install(*, backend: str = "auto", **options: Any) -> Installed:
    """Let vLLM take these experts for unquantized and FP8 MoE layers, in this process, before a model is made.

    backend, options: of megamoe.Layer. Where a layer cannot compute a model's experts, making the model raises
    ConfigError. Raises it here for options that no layer could have, where it was called before, and for a vLLM that
    lacks what is replaced.
    """
    _patches.check_none()
    made = Installed(Layers(*check(backend, options)))
    new: list[tuple[Any, str, Any]] = [(Experts, "layers", made.layers)]
    for module, kind, layout in (
        (unquantized, "unquantized", UnquantizedMoeBackend.TRITON),
        (fp8, "fp8", Fp8MoeBackend.TRITON),
        (compressed_fp8, "fp8", Fp8MoeBackend.TRITON),
    ):
        select, make = f"select_{kind}_moe_backend", f"make_{kind}_moe_kernel"
        _, theirs = (found("vLLM 0.33", module, name) for name in (select, make))
        new += [(module, select, _select(layout)), (module, make, _make(theirs))]
    _patches.put(made, new)
    return made


def installed() -> Installed | None:
    """Return what install() has returned, None before it and after uninstall()."""
    made: Installed | None = _patches.made
    return made


def _select(layout: Any) -> Callable[..., Any]:
    """Return what names these experts, and Triton's layout of weights: that of checkpoints."""

    def select(
        moe_config: Any = None,
        weight_key: Any = None,
        activation_key: Any = None,
        *,
        config: Any = None,
        **_: Any,
    ) -> tuple[Any, type[Experts]]:
        config = moe_config if config is None else config
        batched = config.moe_parallel_config.use_batched_activation_format
        form = mk.FusedMoEActivationFormat
        keys = weight_key, activation_key, form.BatchedExperts if batched else form.Standard
        supported, reason = Experts.is_supported_config(Experts, config, *keys)
        if not supported:
            expected = "others, or VLLM_PLUGINS without megamoe"
            raise ConfigError(
                f"vLLM's experts cannot be a megamoe layer ({reason}): use {expected}"
            )
        return layout, Experts

    return select


def _make(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Return what makes the kernel of these experts, and as before that of others."""

    def make(*args: Any, experts_cls: Any, moe_config: Any, **options: Any) -> Any:
        quant_config = options.get("quant_config") or options.get("moe_quant_config")
        if experts_cls is not Experts:
            return theirs(*args, experts_cls=experts_cls, moe_config=moe_config, **options)
        return mk.FusedMoEKernel(PrepareAndFinalize(), Experts(moe_config, quant_config))

    return make
