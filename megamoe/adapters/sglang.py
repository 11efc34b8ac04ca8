"""Run SGLang's FP8 and FP4 experts (0.5.23, `--moe-a2a-backend megamoe`, Hopper) in a layer.

    SGLANG_PLUGINS=megamoe python -m sglang.launch_server --moe-a2a-backend megamoe ...

SGLang's FP8 experts in 128x128 blocks call three functions of the module `deep_gemm`, which this module replaces. FP8
experts by channel and token, MXFP4 and NVFP4 experts are prepared for the same calls. Router, shared experts, loading,
the experts' parameters and the rest of DeepGEMM stay as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megamoe.adapters.library_layer import LibraryLayer, LibraryLayers, check, ranks_of, together
from megamoe.adapters.library_patches import Patches, found
from megamoe.core.config import Activation, Problem
from megamoe.core.errors import ArgumentError, ConfigError, MegaMoEError
from megamoe.core.table import MXFP4, NVFP4
from megamoe.formats.weights import ExpertWeights

log = logging.getLogger("megamoe")

NAME = "megamoe"
_VERSION = "SGLang 0.5.23"
_BLOCKS = (128, 128, 128)
_PACKED = {MXFP4.block_scales: "fp8xmxfp4", NVFP4.block_scales: "bf16xnvfp4"}
_ROWS = 8  # of gate, then as many of up, in what SGLang makes for DeepGEMM
# What SGLang's call says nothing of, as `moe_runner_config` of experts has it.
_COMPUTED = {"activation": "silu", "is_gated": True, "apply_router_weight_on_input": False}
_COMPUTED |= {"gemm1_alpha": None, "gemm1_beta": None, "gemm1_clamp_limit": None}


class Rows(NamedTuple):
    """Hold w13 and its scales in checkpoint order: all gate rows, then all up rows. A layer reads them in place.

    DeepGEMM's pair is a plain tuple with gate and up interleaved.

    Args:
        weight: [L, 2I, H] e4m3, or packed [L, 2, I, H/2].
        scale: fp32 by blocks of 128x128, or by channel [L, 2I, 1], or of FP4 as ExpertWeights has them.
    """

    weight: Tensor
    scale: Tensor


class Buffer:
    """Replace DeepGEMM's symmetric buffer, with its arguments: one buffer for all MoE layers of these sizes.

    `backend` and `options` are those of megamoe.Layer. The attributes x, x_sf, topk_idx and topk_weights are the buffer
    itself, which stores the arguments of the next call.

    Raises:
        ConfigError: A layer does not support a size or an option.
    """

    def __init__(
        self,
        group: Any,
        num_experts: int,
        num_max_tokens_per_rank: int,
        num_topk: int,
        hidden: int,
        intermediate_hidden: int,
        backend: str = "auto",
        options: dict[str, Any] | None = None,
    ) -> None:
        self.group, self.num_topk = group, num_topk
        self.num_experts, self.num_max_tokens_per_rank = num_experts, num_max_tokens_per_rank
        self._problem = Problem(
            hidden=hidden,
            intermediate=intermediate_hidden,
            num_experts=num_experts,
            top_k=num_topk,
            max_tokens=num_max_tokens_per_rank,
            precision="fp8",
            **ranks_of(group),
        )
        self._stated = check(backend, options or {}, self._problem, equal_shares=True)
        self.x = self.x_sf = self.topk_idx = self.topk_weights = self
        self._layers = LibraryLayers()  # by precision and clamp
        self._call: tuple[Tensor, Tensor, Tensor] | MegaMoEError | None = None

    def stage(self, call: tuple[Tensor, Tensor, Tensor] | MegaMoEError) -> None:
        """Store the arguments of the next call, or an error, which that call raises on all ranks."""
        self._call = call

    def staged(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the stored arguments, once. Raise the stored error, or ArgumentError if nothing was stored."""
        call, self._call = self._call, None
        if call is None:
            raise ArgumentError("buffer", "empty", "one that mega_moe_pre_dispatch_sm90 has filled")
        if isinstance(call, MegaMoEError):
            raise call
        return call

    def layer(self, w2: Tensor, w2_scale: Tensor, clamp: float | None) -> LibraryLayer:
        """Return the layer for these weights. Creating a new one is collective. clamp: limit of gate and up, None: no
        limit.
        """
        by_channel = w2_scale.shape[1:] == (w2.shape[1], 1)
        precision = _PACKED.get(w2_scale.shape[-1], "") if w2.dtype == torch.uint8 else ""
        key = precision or ("fp8_channel" if by_channel else "fp8"), clamp
        if key in self._layers:
            return self._layers[key]

        def problem(_: Any) -> Problem:
            made = replace(self._problem, precision=key[0])
            if clamp is None:
                return made
            return replace(made, activation=Activation("clamped_swiglu", limit=float(clamp)))

        self._layers[key] = LibraryLayer(problem, self.group, w2.device, *self._stated)
        return self._layers[key]

    def close(self) -> None:
        """Free the memory of the layers. The next calls create new ones. Collective."""
        self._layers.close()
        self._call = None


class Installed:
    """Hold the functions that SGLang finds in `deep_gemm`, and those they replaced. install() creates it."""

    def __init__(self, backend: str, options: dict[str, Any]) -> None:
        self._backend, self._options = backend, options
        self._buffers: list[Buffer] = []

    def get_symm_buffer_for_mega_moe(
        self,
        group: Any,
        num_experts: int,
        num_max_tokens_per_rank: int,
        num_topk: int,
        hidden: int,
        intermediate_hidden: int,
        num_shared_experts: int = 0,
        *,
        mma_type: str = "fp8xfp4",
        activation: str = "swiglu",
    ) -> Buffer:
        """Create a buffer, which allocates memory in its first call. SGLang passes mma_type="fp8xfp4" also for FP8
        experts.

        Raises:
            ConfigError: A layer does not support an argument.
        """
        _check("mma_type", mma_type, "fp8xfp4")
        _check("activation", activation, "swiglu")
        _check("num_shared_experts", num_shared_experts, 0)
        sizes = num_experts, num_max_tokens_per_rank, num_topk, hidden, intermediate_hidden
        made = Buffer(group, *sizes, self._backend, self._options)
        self._buffers.append(made)
        return made

    @staticmethod
    def mega_moe_pre_dispatch_sm90(
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        *buffers: Buffer,
        num_tokens: int,
        group_size: int = 128,
        routed_scaling_factor: float = 1.0,
    ) -> None:
        """Store the inputs of the next fp8_mega_moe(); the kernel quantizes x itself, per 128 columns or per token.

        x: [at least T, H] bf16, topk_ids: [at least T, K] int32, topk_weights: [at least T, K]; T = num_tokens rows are
        used. buffers: x, x_sf, topk_idx and topk_weights of one Buffer.

        Raises:
            ArgumentError: The buffers are not from one Buffer of this module. Other errors are raised by
                fp8_mega_moe().
        """
        whole = buffers[0] if buffers else None
        if not isinstance(whole, Buffer) or any(b is not whole for b in buffers):
            kinds = [type(b).__name__ for b in buffers]
            raise ArgumentError("buffers", kinds, "those of one megamoe buffer")
        try:
            _check("group_size", group_size, 128)
            rows = [t.shape[0] if isinstance(t, Tensor) else 0 for t in (x, topk_ids, topk_weights)]
            if not 0 <= num_tokens <= min(rows):
                raise ArgumentError("num_tokens", num_tokens, f"0..{min(rows)}, the rows given")
        except MegaMoEError as error:
            whole.stage(error)
            return
        weights = topk_weights[:num_tokens].float()
        if routed_scaling_factor != 1.0:
            weights = weights * routed_scaling_factor
        whole.stage((x[:num_tokens], topk_ids[:num_tokens], weights))

    @staticmethod
    def fp8_mega_moe(
        y: Tensor,
        l1_weights: tuple[Tensor, Tensor],
        l2_weights: tuple[Tensor, Tensor],
        sym_buffer: Buffer,
        *,
        recipe: tuple[int, int, int] = _BLOCKS,
        activation: str = "swiglu",
        activation_clamp: float | None = None,
        fast_math: bool = True,
    ) -> None:
        """Run the stored tokens and write [T, H] bf16 to the first T rows of y. Collective.

        l1_weights: Rows. l2_weights: w2 [L, H, I] e4m3 and its scales, or packed. Scales are by blocks of 128x128, or
        by channel [L, 2I, 1] and [L, H, 1], or of FP4, whatever `recipe` is. fast_math has no effect.

        Raises:
            ArgumentError: An argument here or in mega_moe_pre_dispatch_sm90() is invalid, or gate and up are
                interleaved because the model was loaded before install(). All ranks raise.
        """
        if not isinstance(sym_buffer, Buffer):
            expected = "one that was made here: call install() before the model is loaded"
            raise ArgumentError("sym_buffer", type(sym_buffer).__name__, expected)
        w2, w2_scale = l2_weights
        layer = sym_buffer.layer(w2, w2_scale, activation_clamp)
        with together(layer):
            _check("recipe", tuple(recipe), _BLOCKS)
            _check("activation", activation, "swiglu")
            if not isinstance(l1_weights, Rows):
                expected = "gate, then up: call install() before the model is loaded"
                raise ArgumentError("l1_weights", f"interleaved by {_ROWS} rows", expected)
            x, topk_ids, topk_weights = sym_buffer.staged()
        w13, w13_scale = l1_weights
        weights = ExpertWeights(w13, w2, w13_scale=w13_scale, w2_scale=w2_scale)
        layer(x, topk_ids, topk_weights, weights, out=y[: x.shape[0]])

    def close(self) -> None:
        """Free the memory of the layers. The next calls create new ones. Collective."""
        for buffer in self._buffers:
            buffer.close()

    def uninstall(self) -> None:
        """Restore SGLang's functions. Models that were loaded in between cannot be used any more."""
        _patches.undo()


_patches = Patches()


def install(*, backend: str = "auto", **options: Any) -> Installed:
    """Replace what SGLang's experts call, in this process. Call it in every worker, before a model is loaded.

    Args:
        backend: Backend of megamoe.Layer. Default: "auto".
        **options: Options of the backend.

    Returns:
        Installed, with close() and uninstall().

    Raises:
        ConfigError: An option is invalid, install() was called before, or SGLang or DeepGEMM lack what is replaced.
    """
    _patches.check_none()
    check(backend, options)
    try:
        import deep_gemm
        from sglang.srt.layers.moe import mega_moe, mega_moe_sm90
        from sglang.srt.layers.moe.moe_runner import deep_gemm as runner
        from sglang.srt.layers.quantization import modelopt_quant, w8a8_fp8
        from sglang.srt.layers.quantization.compressed_tensors import schemes
    except ImportError as error:
        raise ConfigError("sglang", f"not usable ({error})", "SGLang and sgl-deep-gemm") from error
    name = "build_sm90_mega_moe_experts_weights"
    build = found(_VERSION, mega_moe_sm90, name)
    finish = "process_weights_after_loading"
    methods = [
        found(_VERSION, module, kind)
        for module, kind in (
            (schemes, "CompressedTensorsW8A8Fp8MoE"),
            (w8a8_fp8, "W8A8FP8MoEMethod"),
        )
    ]
    by_channel = [(kind, finish, _ready(found(_VERSION, kind, finish))) for kind in methods]
    nvfp4 = found(_VERSION, modelopt_quant, "ModelOptNvFp4FusedMoEMethod")
    packed: list[tuple[Any, str, Any]] = [
        (mega_moe, "build_mega_moe_experts_weights", _build_mxfp4),
        (nvfp4, "_build_mega_moe_weights", lambda _, experts: _build_nvfp4(experts)),
    ]
    for module, of, _ in packed:
        found(_VERSION, module, of)
    made = Installed(backend, options)
    ours = "get_symm_buffer_for_mega_moe", "mega_moe_pre_dispatch_sm90", "fp8_mega_moe"
    new = [(deep_gemm, name, getattr(made, name)) for name in ours]
    core = (
        found(_VERSION, runner, "DeepGemmRunnerCore"),
        "use_swizzle",
        property(_turns, _set_turns),
    )
    in_order = mega_moe_sm90, name, _built_in_order(build)
    _patches.put(made, [in_order, *by_channel, *packed, core, *new])
    return made


def plugin() -> None:
    """Call install() if SGLANG_PLUGINS contains megamoe. SGLang calls this function in every process."""
    from sglang.srt.environ import envs

    named = [name.strip() for name in (envs.SGLANG_PLUGINS.get() or "").split(",")]
    if NAME in named and _patches.made is None:
        install()
        log.info("SGLang's FP8 and FP4 experts with --moe-a2a-backend megamoe are megamoe layers")


def _built_in_order(build: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wrap SGLang's function that validates and interleaves an experts' w13, but keep the order of rows."""

    def build_sm90_mega_moe_experts_weights(experts: Any) -> None:
        if getattr(experts, "_mega_moe_weights_built", False):
            if isinstance(experts.mega_l1_weights, Rows):
                _refer(experts, "weight_scale_inv")  # loaded again, perhaps to other memory
            return
        _check_formula(experts)
        plain = experts.w13_weight.data
        build(experts)
        turned = plain.unflatten(1, (2, -1, _ROWS)).transpose(1, 2).flatten(1, 3)
        pair = (w.contiguous().view(torch.uint8) for w in (turned, experts.w13_weight.data))
        if not torch.equal(*pair):  # bytes, by which NaN equals itself
            expected = f"gate and up by {_ROWS} rows in turn, as of 0.5.23"
            raise ConfigError("SGLang's w13", "in an order that is not known", expected)
        experts.w13_weight.data = plain
        _refer(experts, "weight_scale_inv")

    return build_sm90_mega_moe_experts_weights


def _turns(core: Any) -> bool:
    """Return True if gate and up of these experts are interleaved, for SGLang's own runner of the largest batches."""
    kept = isinstance(getattr(core.config.layer, "mega_l1_weights", None), Rows)
    return bool(vars(core)["use_swizzle"]) and not kept


def _set_turns(core: Any, value: bool) -> None:
    vars(core)["use_swizzle"] = value


def _ready(finish: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Wrap SGLang's function that ends the loading of FP8 experts: prepare experts by channel for our call.

    Other experts stay unchanged: with `--moe-a2a-backend megamoe` SGLang raises an error for them, or uses another
    kernel.
    """

    def process_weights_after_loading(method: Any, layer: Any) -> None:
        from sglang.srt.layers.moe.utils import get_moe_a2a_backend

        finish(method, layer)
        w13, scale = layer.w13_weight.data, layer.w13_weight_scale.data
        if not get_moe_a2a_backend().is_megamoe() or scale.shape[1:] != (w13.shape[1], 1):
            return
        _check_formula(layer)
        _check("w13_input_scale", layer.w13_input_scale, None)
        _refer(layer, "weight_scale")
        layer._mega_moe_sm90_fp8_weights = layer._mega_moe_weights_built = True

    return process_weights_after_loading


def _build_mxfp4(experts: Any) -> None:
    """Prepare MXFP4 experts (DeepSeek-V4) for our call. SGLang has their scales in fp32."""
    if not experts._mega_moe_weights_built:
        weights = experts.w13_weight.data, experts.w2_weight.data
        given = [getattr(experts, f"{name}_weight_scale_inv").data for name in ("w13", "w2")]
        scales = [scale.to(torch.float8_e8m0fnu) for scale in given]
        pairs = zip(given, scales, strict=True)
        if not all(torch.equal(g, scale.to(g.dtype)) for g, scale in pairs):
            raise ConfigError("scales of MXFP4 experts", "others", "powers of two")
        _keep(experts, ExpertWeights.from_mxfp4(*weights, *scales), "weight_scale_inv")


def _build_nvfp4(experts: Any) -> None:
    """Prepare ModelOpt's NVFP4 experts for our call: rows are bf16, their scales are not used."""
    weights = experts.w13_weight.data, experts.w2_weight.data
    scales = experts.w13_weight_scale.data, experts.w2_weight_scale.data
    outer = experts.w13_weight_scale_2.data, experts.w2_weight_scale_2.data
    _keep(experts, ExpertWeights.from_nvfp4(*weights, scales, outer), "weight_scale")


def _keep(experts: Any, made: ExpertWeights, scale: str) -> None:
    """Replace SGLang's FP4 scales by those in the kernel's order, and point calls to weights and scales."""
    _check_formula(experts)
    pairs: Any = (made.w13, made.w13_scale), (made.w2, made.w2_scale)
    for name, (_, value) in zip(("w13", "w2"), pairs, strict=True):
        getattr(experts, f"{name}_{scale}").data = value
    experts.mega_l1_weights, experts.mega_l2_weights = Rows(*pairs[0]), pairs[1]
    experts._mega_moe_sm90_fp8_weights = experts._mega_moe_weights_built = True


def _refer(experts: Any, scale: str) -> None:
    """Point calls to the current memory of the parameters. scale: the suffix of the scales' names."""
    pairs = [
        (getattr(experts, f"{name}_weight").data, getattr(experts, f"{name}_{scale}").data)
        for name in ("w13", "w2")
    ]
    experts.mega_l1_weights, experts.mega_l2_weights = Rows(*pairs[0]), pairs[1]


def _check_formula(experts: Any) -> None:
    """Raise ConfigError for experts with another formula than a layer's. SGLang's call does not contain it."""
    config = experts.moe_runner_config
    for name, value in _COMPUTED.items():
        _check(f"moe_runner_config.{name}", getattr(config, name), value)


def _check(name: str, value: Any, expected: Any) -> None:
    if value != expected:
        raise ConfigError(name, repr(value), repr(expected))
