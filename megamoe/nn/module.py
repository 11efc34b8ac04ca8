"""Define `MegaMoE`: the layer as an nn.Module that owns its parameters. A Layer computes the calls."""

from __future__ import annotations

import copy
import sys
import warnings
from functools import partial
from typing import Any, NoReturn
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from megamoe.backends.options import Options
from megamoe.backends.select import check_device
from megamoe.backends.statistics import Statistics
from megamoe.core.config import Activation, Problem, activation_by_name
from megamoe.core.errors import ArgumentError, ConfigError, MegaMoEError, RankMismatch
from megamoe.core.planes import is_dtensor
from megamoe.core.table import E4M3_BLOCKS, E4M3_CHANNELS, MXFP4, NVFP4, Format
from megamoe.experts.placement import ExpertPlacement
from megamoe.experts.shards import Place, distributed, read, write
from megamoe.formats.weights import ExpertWeights, check_experts, expected_weights, master_types
from megamoe.launch.gathered import Shards, plain
from megamoe.layer import operators
from megamoe.layer.layer import Layer
from megamoe.layer.placed import PlacedLayer
from megamoe.nn.initial import draw
from megamoe.nn.optimizers import watch
from megamoe.nn.quantized import QUANTIZED, check_state, check_taken

_NAMES = ("w13", "w2", "b13", "b2", "w13_scale", "w2_scale")


class MegaMoE(nn.Module):
    """Compute an expert-parallel mixture of experts: y = sum_k topk_weights[:, k] * expert(topk_ids[:, k], x).

    Parameters, also the names in state_dict: w13 [L, P*I, H] (gate rows, then up rows) and w2 [L, H, I]; with bias=True
    also b13 [L, P*I] and b2 [L, H] in fp32. Creating the layer, calls, prepare() and close() are collective over the
    group.

    Args:
        hidden: H, the width of a token.
        intermediate: I, the width of an expert's hidden layer.
        num_experts: E, of all ranks of the group together.
        top_k: K, the experts per token.
        group: Process group over which the experts are distributed; or a DeviceMesh of one dimension, or of two:
            "hosts", and the ranks of each host. None or "alone": this rank holds all experts.
        precision: "bf16", "fp8" (e4m3, scales per block); with frozen weights: "fp8xmxfp4", "bf16xmxfp4", "bf16xnvfp4"
            (FP4 weights with e4m3 or bf16 rows); for inference only: "fp8_channel" (e4m3, scales per token and
            channel). Masters are quantized once per version. Default: "bf16".
        activation: "swiglu", "swiglu_oai", "geglu", "geglu_tanh", "relu2" or an Activation. Default: "swiglu".
        max_tokens: Largest number of tokens per rank and call, equal on all ranks. Default: 8192.
        bias: True: experts have biases. Default: False.
        backend: "auto", "mega", "staged", "emulate" or "reference". The first call or prepare() creates it. Default:
            "auto".
        device: Device of the parameters. Default: torch's.
        dtype: Type of w13 and w2: torch.bfloat16 or, if the precision quantizes weights, torch.float32. Default:
            torch.bfloat16.
        options: An Options record. With a placement, which is for inference,
            parameters are those of this rank's slots, and num_experts and topk_ids are logical: see PlacedLayer and
            move_experts(). Default: Options().
        **given: Fields of the options, by name.

    Raises:
        ConfigError: An argument is invalid. No memory is allocated.
        RankMismatch: The ranks have different arguments.
    """

    w13: nn.Parameter
    w2: nn.Parameter
    b13: nn.Parameter | None
    b2: nn.Parameter | None
    w13_scale: Tensor | None
    w2_scale: Tensor | None

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        num_experts: int,
        top_k: int,
        group: Any = None,
        *,
        precision: str = "bf16",
        activation: str | Activation = "swiglu",
        max_tokens: int = 8192,
        bias: bool = False,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
        options: Options | None = None,
        **given: Any,
    ) -> None:
        super().__init__()

        def problem(ranks: Any) -> Problem:
            init_seed = Options.of(options, given).init_seed
            if not (init_seed is None or (isinstance(init_seed, int) and 0 <= init_seed < 1 << 62)):
                raise ConfigError("init_seed", repr(init_seed), "an int from 0 to 2**62, or None")
            made = Problem(
                hidden=hidden,
                intermediate=intermediate,
                num_experts=num_experts,
                top_k=top_k,
                ep_size=1 if ranks is None else dist.get_world_size(ranks),
                rank=0 if ranks is None else dist.get_rank(ranks),
                max_tokens=max_tokens,
                precision=precision,
                activation=activation_by_name(activation),
                bias=bias,
            )
            check_device(backend, made, device)
            allowed = master_types(made)
            if dtype not in allowed:
                expected = " or ".join(map(str, allowed)) + f" with precision {precision!r}"
                raise ConfigError("dtype", dtype, expected)
            return made

        placement = given.get("placement", getattr(options, "placement", None))
        make = Layer if placement is None else partial(PlacedLayer, placement=placement)
        self._layer = make(problem, group, backend=backend, options=options, **given)
        self.problem, self.group, self.backend = self._layer.problem, self._layer.group, backend
        self._init_seed = self._layer.options.init_seed
        self._delays = self._layer.options.delay_wgrad
        self.place = Place(self.problem, self.group)
        self._shards: Shards | None = None
        if self._layer.options.gathers == "e4m3":
            planes = {"w13": self.problem.activation.planes, "w2": 1}
            self._shards = Shards(self.problem.formats.w, planes)
        self._warned = False  # that FSDP2 rounds routing weights
        self.averaged = False  # whether average_expert_gradients() took it
        masters = expected_weights(self.problem, dtype)
        for name in ("w13", "w2", "b13", "b2"):
            shape, of = masters.get(name, (None, None))
            empty = None if shape is None else torch.empty(shape, dtype=of, device=device)
            self.register_parameter(name, None if empty is None else nn.Parameter(empty))
        for name in ("w13_scale", "w2_scale"):  # filled by load_..._weights
            self.register_buffer(name, None)
        if self.problem.ep_size > 1:
            watch(self)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize w13 and w2 by global expert, truncated normal with std fan_in ** -0.5, and set biases to zero."""
        experts = None if self.placement is None else self.placement.expert_of
        draw(self.place, self._init_seed, self.w13, self.w2, experts)
        for bias in (self.b13, self.b2):
            if bias is not None:
                bias.zero_()

    def forward(
        self,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        *,
        num_tokens_device: Tensor | None = None,
        out: Tensor | None = None,
        x_scale: Tensor | None = None,
    ) -> Tensor:
        """Compute y with the layer's own parameters, see Layer.__call__(). Collective.

        Args:
            x: [..., H] bf16 tokens, at most max_tokens; e4m3 if x_scale is given.
            topk_ids: [..., K] int32 or int64. Ids outside [0, E) are dropped.
            topk_weights: [..., K] of any float type, used in fp32.
            num_tokens_device: [1] int32 on the device. Tokens from this number on are not computed. Default: all are.
            out: Like y, to write y into; not while gradients are recorded. Default: a new tensor.
            x_scale: fp32 scales of a quantized x; not while gradients are recorded. Default: x is bf16.

        Returns:
            y, [..., H] bf16.

        Raises:
            ArgumentError: A tensor does not fit the problem. All ranks raise.
        """
        try:
            weights = self._experts()
            if (
                DistributedDataParallel._active_ddp_module is not None
                and not torch.compiler.is_compiling()
            ):
                check_ignored()
            if getattr(topk_weights, "dtype", None) is torch.bfloat16 and not self._warned:
                self._warned = is_fsdp(self) and warned_of_rounding(self)
            if self._delays and is_fsdp(self):
                expected = "False under fully_shard(): FSDP2 frees weights behind the backward pass"
                raise ConfigError("delay_wgrad", self._delays, expected)
        except Exception as error:
            self._raise_on_all(error, "a first call")
        # By position and by the method's name: half a microsecond less than Layer.__call__.
        return self._layer._call(
            x, topk_ids, topk_weights, weights, num_tokens_device, x_scale, out
        )

    def expert_weights(self) -> ExpertWeights:
        """Return the parameters as ExpertWeights: masters, or the loaded quantized weights."""
        b13 = None if self.b13 is None else self.b13.float()  # model.to(bf16) casts biases too
        b2 = None if self.b2 is None else self.b2.float()
        given = {"w13": self.w13, "w2": self.w2, "b13": b13, "b2": b2}
        whole = {n: plain(self.place.whole(n, t)) for n, t in given.items() if t is not None}
        return ExpertWeights(**whole, w13_scale=self.w13_scale, w2_scale=self.w2_scale)

    def _raise_on_all(self, error: Exception, call: str) -> NoReturn:
        """Raise an error that names missing weights, on this rank and on the others, which wait in `call`."""
        found = error
        for name in ("w13", "w2", "b13", "b2"):
            given = self._parameters.get(name, self.__dict__.get(name))
            lacks = not isinstance(given, Tensor) and (given is not None or name in ("w13", "w2"))
            if lacks and not hasattr(type(self), name):  # there, it is computed: parametrized
                found = ArgumentError(name, type(given).__name__, "a parameter of the layer")
                break
        with self._layer.together(call):
            if found is error:
                raise error
            raise found from error

    def _experts(self) -> ExpertWeights:
        """Return expert_weights() without nn.Module's attribute look-up, which takes a microsecond each."""
        if self.place.distributed or type(self).expert_weights is not MegaMoE.expert_weights:
            return self.expert_weights()
        found, buffers = self._parameters, self._buffers
        b13: Tensor | None
        b2: Tensor | None
        try:
            w13, w2, b13, b2 = found["w13"], found["w2"], found["b13"], found["b2"]
            s13, s2 = buffers["w13_scale"], buffers["w2_scale"]
        except KeyError:  # parametrized, or replaced by something else
            return self.expert_weights()
        if type(w13) is not nn.Parameter or type(w2) is not nn.Parameter:  # a shard, perhaps
            return self.expert_weights()
        if b13 is not None and b2 is not None:
            b13, b2 = b13.float(), b2.float()
        return ExpertWeights(w13, w2, b13, b2, s13, s2)

    def prepare(self) -> None:
        """Open the backend, compile and quantize, as the first call would. Collective.

        Call it before torch.compile or graph capture.
        """
        try:
            weights = self.expert_weights()
        except Exception as error:
            if not self._layer.is_open:
                self._raise_on_all(error, "prepare()")
            raise
        self._layer.prepare(weights)

    @property
    def _is_fsdp_managed_module(self) -> bool:
        """True after fully_shard() of this layer or of a module around it, which sets it after sharding."""
        return bool(self.__dict__.get("_sharded", False))

    @_is_fsdp_managed_module.setter
    def _is_fsdp_managed_module(self, value: bool) -> None:
        self.__dict__["_sharded"] = value
        if self._shards is not None:
            self._shards.attach(self)
        for p in self.parameters():
            self.place.rows(p)
            if self.averaged and is_dtensor(p):
                called = "called before fully_shard(), which divides by other ranks"
                raise ArgumentError("average_expert_gradients", called, "called after it")

    def divide_gradients(self, num_ranks: int) -> None:
        """Divide the experts' gradients by num_ranks, where FSDP2 or the layer's backward pass reduces them.

        Args:
            num_ranks: The divisor.
        """
        self.averaged = True
        if not is_fsdp(self):
            self._layer.divide_weight_gradients(num_ranks)
            return
        fsdp: Any = self
        fsdp.set_gradient_divide_factor(float(num_ranks))
        ranks = fsdp.w13.device_mesh.size()
        copies = ranks // self.problem.ep_size if self.place.distributed else ranks
        if not self.w13.is_cuda and copies > 1:
            # gloo cannot scale while it reduces. With one copy, torch 2.13 would divide twice.
            fsdp.set_force_sum_reduction_for_comms(True)

    @torch.no_grad()
    def load_fp8_weights(
        self, w13: Tensor, w2: Tensor, w13_scale: Tensor, w2_scale: Tensor
    ) -> None:
        """Replace the masters by e4m3 weights with fp32 scales per 128x128 block or per channel.

        The tensors are used without a copy. The layer then trains only its input, its routing weights and its biases.

        Args:
            w13: As in ExpertWeights. The blocks of its scales restart at the first row of up.
            w2: As in ExpertWeights.
            w13_scale: As in ExpertWeights.
            w2_scale: As in ExpertWeights.

        Raises:
            ArgumentError: A tensor does not fit the layer.
        """
        by_channel = self.problem.formats.w == E4M3_CHANNELS
        stored = E4M3_CHANNELS if by_channel else E4M3_BLOCKS
        self._take(stored, dict(zip(QUANTIZED, (w13, w2, w13_scale, w2_scale), strict=True)))

    @torch.no_grad()
    def load_mxfp4_weights(self, weights: ExpertWeights) -> None:
        """Replace the masters by MXFP4 weights. Biases are copied.

        Args:
            weights: Result of ExpertWeights.from_mxfp4().

        Raises:
            ArgumentError: A tensor does not fit the layer.
        """
        self._take_fp4(MXFP4, weights)

    @torch.no_grad()
    def load_nvfp4_weights(self, weights: ExpertWeights) -> None:
        """Replace the masters by NVFP4 weights. Biases are copied.

        Args:
            weights: Result of ExpertWeights.from_nvfp4().

        Raises:
            ArgumentError: A tensor does not fit the layer.
        """
        self._take_fp4(NVFP4, weights)

    def _take_fp4(self, stored: Format, weights: ExpertWeights) -> None:
        check_experts("weights", weights)
        weights.validate(self.problem, weights.w13.device)
        given = weights.named() | {"w13": weights.w13.flatten(1, -2)}
        self._take(stored, {name: given[name].contiguous() for name in QUANTIZED})
        for name in given.keys() & {"b13", "b2"}:
            own = getattr(self, name)
            own.copy_(given[name].reshape(own.shape))

    def _take(self, stored: Format, given: dict[str, Tensor]) -> None:
        """Take weights of the layer's format in place of masters."""
        check_taken(self.problem, stored, given)
        for name, tensor in given.items():
            setattr(self, name, tensor if "scale" in name else nn.Parameter(tensor, False))
        self.invalidate()

    def _apply(self, fn: Any, recurse: bool = True) -> MegaMoE:
        """Move and cast, except that quantized weights keep their dtypes and scales, as integers do."""
        loaded = [getattr(self, n) for n in QUANTIZED] if self.w13_scale is not None else []

        def move(t: Tensor) -> Tensor:
            made = fn(t)
            cast = made.dtype != t.dtype and any(t is q for q in loaded)
            return t.to(made.device) if cast else made

        super()._apply(move, recurse)
        if self._shards is not None and self._is_fsdp_managed_module:
            self._shards.attach(self)
        self.invalidate()  # which lets go of what the parameters were
        return self

    @torch.no_grad()
    def distribute(self, mesh: DeviceMesh) -> MegaMoE:
        """Convert the parameters to DTensors, Shard(0) over `mesh`. Call it before the optimizer and fully_shard().

        Use it in training loops in which every parameter is a DTensor.

        Args:
            mesh: DeviceMesh with the ranks of the group.

        Returns:
            This module.

        Raises:
            ArgumentError: The number of ranks does not divide num_experts.
        """
        if not isinstance(mesh, DeviceMesh):
            raise ArgumentError("mesh", type(mesh).__name__, "a DeviceMesh")
        self._refuse_slots("distribute()")
        parameters = {
            name: distributed(self.problem, self.group, mesh, p.data)
            for name, p in self.named_parameters()
        }
        for name, value in parameters.items():
            wanted = getattr(self, name).requires_grad
            self.register_parameter(name, nn.Parameter(value, requires_grad=wanted))
        self.place = Place(self.problem, self.group, distributed=True)
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], *args: Any
    ) -> None:
        """Load this rank's experts from a state dict; quantized weights replace masters."""
        check_state(self.problem, state_dict, prefix, self.w13.dtype)
        parameters = {name: getattr(self, name) for name in _NAMES}
        if isinstance(self._layer, PlacedLayer):
            self._layer.take_slots(state_dict, prefix, _NAMES)
        else:
            read(self.place, state_dict, prefix, metadata, parameters)
        given: dict[str, Any] = {name: state_dict.get(prefix + name) for name in QUANTIZED}
        stored, device = self.problem.formats.w, self.w13.device
        complete = stored.scaled and all(g is not None for g in given.values())
        if complete and given["w13"].dtype == stored.dtype != self.w13.dtype:
            wide = {n: g.float() if g.dtype == torch.bfloat16 else g for n, g in given.items()}
            self._take(stored, {name: g.to(device) for name, g in wide.items()})  # scales, exactly
        super()._load_from_state_dict(state_dict, prefix, metadata, *args)
        self.invalidate()

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, *args: Any) -> None:
        """Describe which experts the tensors are, and invalidate copies: dcp.load() writes into FSDP2's shards."""
        self._refuse_slots("state_dict()")
        super()._save_to_state_dict(destination, prefix, *args)
        write(self.place, destination, prefix, _NAMES)
        self.invalidate()

    @property
    def accumulate_into_main_grad(self) -> bool:
        """True if gradients of w13 and w2 are added to their main_grad instead of grad."""
        return self._layer.accumulate_into_main_grad

    @property
    def num_delayed(self) -> int:
        """Number of backward passes that wait for backward_dw()."""
        return self._layer.num_delayed

    def backward_dw(self, passes: int = 1) -> None:
        """Compute the weight gradients of the oldest waiting backward passes, see Layer.backward_dw().

        Args:
            passes: Number of passes. Default: 1.
        """
        self._layer.backward_dw(passes)

    def statistics(self) -> Statistics:
        """Return statistics of the last call, see Layer.statistics()."""
        return self._layer.statistics()

    def check(self) -> None:
        """Wait for the device, and raise the error of a failed launch if there is one."""
        self._layer.check()

    def reset(self) -> None:
        """Make the layer usable again after a failed launch, see Layer.reset(). Collective."""
        self._layer.reset()

    @property
    def placement(self) -> ExpertPlacement | None:
        """The current placement, None if the layer has no redundant experts."""
        return self._layer.placement

    def move_experts(self, placement: ExpertPlacement) -> None:
        """Move the parameters to the slots of another placement, see PlacedLayer.move_experts(). Collective.

        Args:
            placement: The new placement, equal on all ranks.
        """
        if not isinstance(self._layer, PlacedLayer):
            raise ConfigError("placement", None, "a placement, passed to the constructor")
        own = self._parameters | self._buffers
        weights: dict[str, Any] = {name: own.get(name) for name in _NAMES}
        self._layer.move_experts(placement, ExpertWeights(**weights))

    def _refuse_slots(self, call: str) -> None:
        """Raise ConfigError for what takes slots for experts."""
        if self.placement is not None:
            expected = f"None where {call} is called: the layer's tensors are slots, not experts"
            raise ConfigError("placement", "given", expected)

    def quantize_experts(self, follows: bool = False) -> None:
        """Do as megamoe.quantize_experts(), for this layer.

        Args:
            follows: As for Layer.quantize(). Default: False.
        """
        whole = not is_dtensor(self.w13) or (
            self.place.distributed and len(self.w13.to_local()) == self.problem.num_local_experts()
        )
        if whole:  # not FSDP2's shards
            self._layer.quantize(self.expert_weights(), follows)

    def invalidate(self) -> None:
        """Quantize again at the next call, after writes that torch does not count; see megamoe.invalidate()."""
        if self._shards is not None:
            self._shards.cache.invalidate()
        self._layer.invalidate()

    def close(self) -> None:
        """Free the backend and the window, after a barrier of the group. The next call opens them again."""
        self._layer.close()

    def __del__(self) -> None:
        layer = self.__dict__.get("_layer")
        if layer is not None and layer.needs_close:
            message = "a MegaMoE layer was deleted without close(): its window stays allocated"
            warnings.warn(message, ResourceWarning, stacklevel=2)

    def __deepcopy__(self, memo: dict[int, Any]) -> MegaMoE:
        """Return a separate layer with equal parameters, not opened yet. For one rank only."""
        if self.problem.ep_size > 1:
            raise MegaMoEError(
                f"a MegaMoE layer over {self.problem.ep_size} ranks shares memory with them and cannot be copied; "
                "make a new one on every rank and load the state_dict"
            )
        new = memo[id(self)] = type(self).__new__(type(self))
        shared = ("problem", "group", "place")
        for name, value in self.__dict__.items():
            new.__dict__[name] = value if name in shared else copy.deepcopy(value, memo)
        return new

    def extra_repr(self) -> str:
        """Return what print(layer) shows."""
        names = ["hidden", "intermediate", "num_experts", "top_k", "ep_size", "rank", "precision"]
        sizes = ", ".join(f"{name}={getattr(self.problem, name)}" for name in names)
        return f"{sizes}, activation={self.problem.activation.kind}, backend={self.backend}"


def is_fsdp(module: nn.Module) -> bool:
    """Whether FSDP2's fully_shard() was called on this very module."""
    if "torch.distributed.fsdp" not in sys.modules:
        return False
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


_ignoring: WeakSet[DistributedDataParallel] = WeakSet()  # those that leave experts alone


def check_ignored() -> None:
    """Raise RankMismatch if DDP, around this call, synchronizes experts, which differ between ranks."""
    ddp = DistributedDataParallel._active_ddp_module
    if ddp is None or ddp in _ignoring:
        return
    synchronized = set(map(id, ddp._module_parameters))
    for name, layer in ddp.module.named_modules():
        if isinstance(layer, MegaMoE) and any(id(p) in synchronized for p in layer.parameters()):
            ranks = layer.place.mixed(dist.get_process_group_ranks(ddp.process_group))
            if ranks:
                raise RankMismatch(
                    f"DistributedDataParallel has overwritten the experts of {name or 'the model'} on ranks {ranks} "
                    "with those of the first one: call megamoe.ignore_experts_in_ddp(model) before DDP(model), and "
                    "load the experts again"
                )
    _ignoring.add(ddp)


operators.before_call.append(check_ignored)


def warned_of_rounding(module: Any) -> bool:
    """Warn where FSDP2's policy casts a call's routing weights to bf16; return whether it does."""
    policy = module._get_fsdp_state()._mp_policy
    casts = bool(policy.cast_forward_inputs) and policy.param_dtype is torch.bfloat16
    if casts:
        message = (
            "FSDP2 rounds topk_weights to bfloat16: its MixedPrecisionPolicy has param_dtype=torch.bfloat16 and "
            "cast_forward_inputs=True. Call fully_shard() on the layer with cast_forward_inputs=False to keep fp32"
        )
        warnings.warn(message, stacklevel=2)
    return casts
