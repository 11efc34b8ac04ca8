"""Run vLLM's MoE layers (0.33; BF16, FP8 in 128x128 blocks or by channel and token, MXFP4, NVFP4) in megamoe layers.

    VLLM_PLUGINS=megamoe vllm serve Qwen/Qwen3-30B-A3B --data-parallel-size 8 --enable-expert-parallel

Dispatch, experts and combine are one call over the expert-parallel group. It replaces vLLM's experts and their prepare
and finalize steps (vllm_experts.py). Routers, shared experts, loading and the experts' parameters stay vLLM's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import vllm.model_executor.layers.fused_moe.modular_kernel as mk
import vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method as unquantized
import vllm.model_executor.layers.quantization.fp8 as fp8
import vllm.model_executor.layers.quantization.modelopt as modelopt
import vllm.model_executor.layers.quantization.mxfp4 as mxfp4
from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend
from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import NvFp4MoeBackend
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w4a4_nvfp4 as compressed_nvfp4,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w8a8_fp8 as compressed_fp8,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kFp8Dynamic128Sym,
    kMxfp4Static,
)

from megamoe.adapters.library_layer import check
from megamoe.adapters.library_patches import Patches, found
from megamoe.adapters.vllm_experts import Experts, Layers, PrepareAndFinalize
from megamoe.core.errors import ConfigError


class Installed:
    """Hold what install() has replaced, and the layers created since. install() creates it."""

    def __init__(self, layers: Layers) -> None:
        self.layers = layers

    def close(self) -> None:
        """Free the memory of the layers. The next calls create new ones. Collective."""
        self.layers.close()

    def uninstall(self) -> None:
        """Restore vLLM's experts, for layers that are created from then on."""
        _patches.undo()


_patches = Patches()


def install(*, backend: str = "auto", **options: Any) -> Installed:
    """Use megamoe for vLLM's unquantized and FP8 MoE layers, in this process. Call it before a model is created.

    If a layer does not support a model's experts, creating the model raises ConfigError.

    Args:
        backend: Backend of megamoe.Layer. Default: "auto".
        **options: Options of the backend.

    Returns:
        Installed, with close() and uninstall().

    Raises:
        ConfigError: An option is invalid, install() was called before, or this vLLM lacks what is replaced.
    """
    _patches.check_none()
    made = Installed(Layers(*check(backend, options)))
    new: list[tuple[Any, str, Any]] = [(Experts, "layers", made.layers)]
    in_fp8 = kMxfp4Static, kFp8Dynamic128Sym
    for module, kind, select in (
        (unquantized, "unquantized", _select(UnquantizedMoeBackend.TRITON)),
        (fp8, "fp8", _select(Fp8MoeBackend.TRITON)),
        (compressed_fp8, "fp8", _select(Fp8MoeBackend.TRITON)),
        (mxfp4, "mxfp4", _select(Mxfp4MoeBackend.EMULATION, kMxfp4Static)),
        (mxfp4, "deepseek_v4_mxfp4", _select(Mxfp4MoeBackend.EMULATION, *in_fp8)),
        (modelopt, "nvfp4", _select(NvFp4MoeBackend.EMULATION)),
        (compressed_nvfp4, "nvfp4", _select(NvFp4MoeBackend.EMULATION)),
    ):
        name = f"select_{kind}_moe_backend"
        make = f"make_{kind.removeprefix('deepseek_v4_')}_moe_kernel"
        _, theirs = (found("vLLM 0.33", module, each) for each in (name, make))
        new += [(module, name, select), (module, make, _make(theirs))]
    _patches.put(made, new)
    return made


def installed() -> Installed | None:
    """Return the result of install(), None if it was not called or after uninstall()."""
    made: Installed | None = _patches.made
    return made


def _select(layout: Any, weights: Any = None, rows: Any = None) -> Callable[..., Any]:
    """Return a function that selects these experts, with a layout of weights that is that of checkpoints.

    weights, rows: their scheme, if vLLM does not state it.
    """

    def select(
        moe_config: Any = None,
        weight_key: Any = weights,
        activation_key: Any = rows,
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
        return layout, Experts.of(weight_key, activation_key)

    return select


def _make(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that creates the kernel of these experts, and vLLM's kernel for other experts."""

    def make(*args: Any, experts_cls: Any, moe_config: Any, **options: Any) -> Any:
        quant_config = options.get("quant_config") or options.get("moe_quant_config")
        if not issubclass(experts_cls, Experts):
            return theirs(*args, experts_cls=experts_cls, moe_config=moe_config, **options)
        return mk.FusedMoEKernel(PrepareAndFinalize(), experts_cls(moe_config, quant_config))

    return make
