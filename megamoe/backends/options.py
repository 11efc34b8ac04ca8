"""Define `Options`: settings of models, training loops and backends that most layers leave at their defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from megamoe.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Options:
    """Hold the options of a layer, which takes the record as `options=`, or its fields by name.

    A backend ignores the options of other backends, since "auto" may select either.

    Args:
        routed_scaling_factor: factor of y, applied to topk_weights in fp32
        apply_router_weight_on_input: y = expert(x * topk_weights); top_k 1 only
        accumulate_into_main_grad: add gradients of w13, w2 to `main_grad` (Megatron)
        delay_wgrad: weight gradients in `backward_dw()`; `"keep"`: from rows that calls stash
        weight_gradients: what they multiply: `bf16`, or `e4m3`, FP8's default
        transposes: of FP8 weights: `kept` by the layer, or `made` in each backward pass
        gathers: what FSDP2 gathers of an FP8 layer: `masters`, or `e4m3` with scales
        init_seed: draw experts by seed and global expert, by torch version; default: torch's generator
        placement: redundant experts, for inference: which expert each slot holds, see `PlacedLayer`
        window: window to share with other layers; default: the layer creates its own
        reserve_sms: SMs left to other kernels; default: a training launch takes the SMs that are free
        pool_rows: rows of the pool; fewer rows cost more passes and never change results
        timeout_s: longest wait in seconds for a flag or, over several hosts, for a rank
        chunks: parts into which a call over hosts is split; default: by the layer's sizes
        exchange: `exact`: only needed rows; `static`: fixed slots, which CUDA graphs can capture
        pdl: for developers: programmatic dependent launch
        profile: for developers: record times of the kernel's steps
        step_blocks: for developers: blocks of a step of the schedule
        num_ctas: for developers: CTAs of a launch
        rounding: for developers: where the reference rounds
        few: for developers: `False`: the kernel for few tokens is never taken
    """

    routed_scaling_factor: float = 1.0
    apply_router_weight_on_input: bool = False
    accumulate_into_main_grad: bool = False
    delay_wgrad: bool | Literal["keep"] = False
    weight_gradients: Literal["bf16", "e4m3"] | None = None
    transposes: Literal["kept", "made"] = "kept"
    gathers: Literal["masters", "e4m3"] = "masters"
    init_seed: int | None = None
    placement: Any = None
    window: Any = None
    reserve_sms: int | None = None
    pool_rows: int | None = None
    timeout_s: float | None = None
    chunks: int | None = None
    exchange: str = "exact"
    pdl: Any = None
    profile: Any = None
    step_blocks: Any = None
    num_ctas: Any = None
    rounding: Any = None
    few: Any = None

    @staticmethod
    def of(options: Options | None, given: Mapping[str, Any]) -> Options:
        """Return the record with the fields that were given by name. Raises ConfigError for other names."""
        if options is not None and not isinstance(options, Options):
            raise ConfigError("options", type(options).__name__, "megamoe.Options")
        names = [of.name for of in fields(Options)]
        for name in given.keys() - set(names):
            raise ConfigError("option", repr(name), "one of " + ", ".join(names))
        return replace(options or Options(), **given)

    def of_backend(self) -> dict[str, Any]:
        """Return those of the backends that are set."""
        return {n: v for n in OF_BACKENDS if (v := getattr(self, n)) is not None}


# What the layer itself reads.
OF_LAYER = {"routed_scaling_factor", "apply_router_weight_on_input", "accumulate_into_main_grad"}
OF_LAYER |= {"delay_wgrad", "transposes", "gathers", "init_seed", "placement"}
OF_BACKENDS = [of.name for of in fields(Options) if of.name not in OF_LAYER]
