"""Define `Layer`: the differentiable layer over weights that the caller owns."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megamoe.backends.call import Call, check_out
from megamoe.backends.options import Options
from megamoe.backends.select import (
    Opening,
    agreed_options,
    check_options,
    hosts_of,
    open_backend,
    resolve,
)
from megamoe.backends.statistics import Statistics
from megamoe.core.config import Problem
from megamoe.core.errors import ArgumentError, ConfigError, MegaMoEError
from megamoe.core.table import E4M3_BLOCKS
from megamoe.core.transforms import faked, lasting, records, watched
from megamoe.core.uncompiled import uncompiled
from megamoe.experts.placement import ExpertPlacement
from megamoe.formats.quantized import QuantizedRows
from megamoe.formats.weights import ExpertWeights, check_experts, check_tensor
from megamoe.group.group import ALONE, Group, RankConfig, Together
from megamoe.group.hosts import host_name
from megamoe.launch.cache import QuantizedCache
from megamoe.layer import main_grad
from megamoe.layer.autograd import RecordOptions, apply, record, refuse_tangents
from megamoe.layer.delayed import Delayed
from megamoe.layer.inputs import Inputs, flat
from megamoe.layer.rows import Weighting, check_weights, checked, taken
from megamoe.layer.runtime import Runtime, Turns, runtime_of
from megamoe.layer.signature import Signature, Signatures

_PLAIN = (Tensor, torch.nn.Parameter)


class Layer:
    """Run expert-parallel mixtures of experts over weights that the caller owns.

    The layer owns backend, window and FP8 copies. Calls, prepare() and close() are collective over the group. FP8
    copies of bf16 weights are cached for one set of weights; a layer that is called with several sets in turn quantizes
    at each change. Calls from several threads take turns; over R > 1 ranks only one thread may call, because all ranks
    need the same order.

    Args:
        problem: Sizes, precision and activation; ep_size and rank must be those of `group`. Or a function from the
            process group (None: one rank) to a Problem. If the function fails on one rank, all ranks raise.
        group: Process group over which the experts are distributed; or a DeviceMesh of one dimension, or of two:
            "hosts", and the ranks of each host. None or "alone": this rank holds all experts.
        backend: "auto", "mega", "staged", "emulate" or "reference". The first call or prepare() creates it. Default:
            "auto".
        options: An Options record. With accumulate_into_main_grad or delay_wgrad, the layer is not called inside
            torch.compile. With delay_wgrad=True, a backward pass keeps dy and what its call saved until backward_dw().
            "keep" keeps the rows of the weight gradients instead, 4 * H + 2 * (P + 1) * I bytes per pool row, half of
            that with weight_gradients="e4m3" (memory_report()["stash_bytes"]); backends other than "mega" and "emulate"
            treat it as True. Default: Options().
        **given: Fields of the options, by name.

    Raises:
        ConfigError: The problem or an option is invalid. No memory is allocated.
        RankMismatch: The ranks have different arguments.
    """

    placement: ExpertPlacement | None = None  # of a PlacedLayer

    def __init__(
        self,
        problem: Problem | Callable[[Any], Problem],
        group: Any = None,
        *,
        backend: str = "auto",
        options: Options | None = None,
        **given: Any,
    ) -> None:
        self.ranks = ranks = Group.of(group)
        self.group = ranks.process_group

        def state() -> RankConfig:
            made = problem(self.group) if callable(problem) else problem
            chosen = Options.of(options, given)
            check_options(made, ranks, chosen.of_backend())
            gathers = ("masters", "e4m3") if made.formats.w == E4M3_BLOCKS else ("masters",)
            for name, known, expected in (
                ("delay_wgrad", (False, True, "keep"), "False, True or 'keep'"),
                ("gathers", gathers, "'masters', or 'e4m3' with precision 'fp8'"),
                ("transposes", ("kept", "made"), "'kept' or 'made'"),
            ):
                if (value := getattr(chosen, name)) not in known:
                    raise ConfigError(name, repr(value), expected)
            if chosen.placement is not self.placement:
                raise ConfigError("placement", "given", "None: such a Layer is a PlacedLayer")
            factor, on_input = Weighting.of(made, chosen)
            equal = {
                "routed_scaling_factor": factor,
                "apply_router_weight_on_input": on_input,
                "delay_wgrad": repr(chosen.delay_wgrad),
                "placement": getattr(self.placement, "expert_of", None),
                "backend": repr(resolve(backend)),
                **agreed_options(made, vars(chosen)),
            }
            return RankConfig((made, host_name()), equal, made)

        said = ranks.agree("a new layer", state)
        self.problem: Problem = said[ranks.rank][0]
        self.options = Options.of(options, given)
        self._options = self.options.of_backend()
        names = [host for _, host in said.values()]
        hosts_of(backend, self.problem, ranks, names, self._options)  # raises ConfigError
        self.backend = backend
        self._number = ranks.number("layers")
        self._weighting = Weighting.of(self.problem, self.options)
        self.accumulate_into_main_grad = bool(self.options.accumulate_into_main_grad)
        self._delayed = self._new_delayed()
        # Gradients of weights go elsewhere than to their grad, or later.
        self._elsewhere = self.accumulate_into_main_grad or self._delayed is not None
        self._runtime: Runtime | None = None
        self._mean_over = 1
        self._follows = False  # see quantize()
        self._signatures = Signatures()
        self._lock = Turns()  # of threads that call
        self._adjusts = self._weighting != Weighting()  # whether _adjusted() changes a call
        trains = self.problem.formats.trains
        precision = f"precision {self.problem.precision!r} has no backward pass"
        self._no_gradients = None if trains else precision  # why none can be recorded

    def __call__(
        self,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        weights: ExpertWeights,
        *,
        num_tokens_device: Tensor | None = None,
        out: Tensor | None = None,
        x_scale: Tensor | None = None,
    ) -> Tensor:
        """Compute y. Differentiable in x, topk_weights and all weights except FP8, FP4 and their scales. Collective.

        Under autocast, fp32 and fp16 x are cast to bf16. With R > 1, if one rank rejects its arguments, all ranks
        raise.

        Args:
            x: [..., H] bf16 tokens, at most max_tokens; e4m3 if x_scale is given.
            topk_ids: [..., K] int32 or int64. Ids outside [0, E) are dropped.
            topk_weights: [..., K] of any float type, used in fp32.
            weights: This rank's experts: bf16 masters, or the precision's format with scales.
            num_tokens_device: [1] int32 on the device. Tokens from this number on are not computed: their rows of y are
                undefined and their gradients zero. Default: all tokens are computed.
            out: Like y, to write y into; not while gradients are recorded. Default: a new tensor.
            x_scale: fp32 scales of a quantized x, [..., ceil(H/128)] or, by token, [..., 1]; not while gradients are
                recorded. Ranks may differ in it. Default: x is bf16.

        Returns:
            y, [..., H] bf16.

        Raises:
            ArgumentError: A tensor does not fit the problem, or the precision does not train but gradients would be
                recorded.
        """
        return self._call(x, topk_ids, topk_weights, weights, num_tokens_device, x_scale, out)

    def _call(self, *call: Any) -> Tensor:
        """Do as __call__() does, by position: the arguments of Inputs.of(), then out."""
        if torch.compiler.is_compiling():
            return self._traced(*call)
        self.ranks.met = False
        try:  # a steady call does not pay for together()
            known = None if self._runtime is None else self._signatures.find(*call)
            if known is not None:
                if not (known.requires_grad and torch.is_grad_enabled()):
                    return self._launch(known, *call)
                if known.trains and call[-1] is None:
                    return self._record(known, Inputs.of(*call[:-1]))
            return self._checked(*call)
        except Exception as error:
            self.together().tell(error)
            raise

    def together(self, call: str = "a first call") -> Together:
        """Return a context that raises an error of its block on all ranks that wait in a call of this layer.

        call: What they wait in if the layer is not open, one of order.CALLS.
        """
        return self.ranks.together(call, lambda: self._runtime and self._runtime.backend)

    def _launch(self, known: Signature, *call: Any) -> Tensor:
        """Make a validated call: contiguous tensors, no gradients, and nothing observes the operators.

        call: as _call() takes it.
        """
        x, topk_ids, topk_weights, weights, count, x_scale, out = call
        runtime, y = self._runtime, out
        assert runtime is not None
        if self._adjusts:
            inputs = self._adjusted(Inputs.of(*call[:-1]))
            x, topk_ids, topk_weights, x_scale = *inputs[:3], inputs.x_scale
        whole = len(known.shape) == 2
        if not whole:
            x, topk_ids, topk_weights = flat(x), flat(topk_ids), flat(topk_weights)
            x_scale = None if x_scale is None else flat(x_scale)
            y = None if out is None else flat(out)
        rows = x if x_scale is None else QuantizedRows(x, x_scale)
        with runtime.lock:
            mine = runtime.weights(weights)
            call = Call(rows, topk_ids, topk_weights, mine, count, y, known)
            y, _ = runtime.backend.forward(call)
        if out is not None:
            return out
        return y if whole else y.view(known.shape)

    def _record(self, known: Signature | None, inputs: Inputs) -> Tensor:
        """Make a validated call and record its gradients. known: None if something observes the operators."""
        runtime = self._runtime
        assert runtime is not None
        if self._adjusts:
            inputs = self._adjusted(inputs)
        if known is None and not self._elsewhere:
            return apply(inputs, runtime.handle, runtime.state_bytes, keep=True)
        further = inputs.weights, self.accumulate_into_main_grad, self._delayed, known
        how = RecordOptions(runtime.handle, runtime.state_bytes, *further)
        return self._uncompiled(inputs, how) if self._elsewhere else record(inputs, how)

    @uncompiled(
        "a backward pass that adds to main_grad, or delays weight gradients, is not seen by torch.compile: "
        "leave the layer out of the graph, or accumulate_into_main_grad=False and delay_wgrad=False"
    )
    def _uncompiled(self, inputs: Inputs, how: RecordOptions) -> Tensor:
        """Make a call whose weight gradients are added to main_grad, or wait."""
        assert how.weights is not None
        if how.adding:
            main_grad.check(how.weights)
        if how.delayed is not None:
            how.delayed.check()
        return record(inputs, how)

    def _adjusted(self, inputs: Inputs) -> Inputs:
        """Return the tensors that the backend computes with."""
        return self._weighting.apply(self.problem, inputs)

    @uncompiled("a call that torch does not compile is checked as a whole")
    def _checked(self, *call: Any) -> Tensor:
        """Check a call, and make it. call: as _call() takes it."""
        *given, out = call
        weights = given[3]
        check_experts("weights", weights)
        inputs = checked(self.problem, Inputs.of(*given))
        tensors = [t for _, t in inputs.named()]
        recording = self._recording(inputs, out)
        if self._runtime is None:
            self._open(weights, "a first call")
        if not all(type(t) in _PLAIN for t in tensors) or watched():
            return self._apply(inputs, out, recording)
        call = *inputs[:3], weights, inputs.num_tokens_device, inputs.x_scale, out
        known = self._signatures.find(*call)
        if known is None:
            saved = not any(t.is_inference() for t in tensors)
            trains = self._no_gradients is None and inputs.x_scale is None and saved
            trains = trains and not self._frozen(inputs)
            known = self._signatures.add(Signature(inputs, out, trains))
        return self._record(known, inputs) if recording else self._launch(known, *call)

    def _traced(self, *call: Any) -> Tensor:
        """Trace a call for torch.compile. Its operator validates it when the graph runs, so that all ranks raise."""
        *given, out = call
        weights = given[3]
        if self._runtime is None:
            self._open(weights, "a first call")
        inputs = taken(Inputs.of(*given))
        for name, t in inputs.named():
            if t.device != weights.w13.device:  # the operator would not run at all
                raise ArgumentError(f"{name}.device", t.device, f"{weights.w13.device}")
        return self._apply(inputs, out, self._recording(inputs, out))

    def _apply(self, inputs: Inputs, out: Tensor | None, recording: bool) -> Tensor:
        """Call the layer by its operator, for who compiles or watches."""
        if recording:
            return self._record(None, inputs)
        y = apply(self._adjusted(inputs), self.handle)
        return y if out is None else out.copy_(y)

    def _recording(self, inputs: Inputs, out: Tensor | None) -> bool:
        """Return whether a call's gradients are recorded. Raises ArgumentError if they, or `out`, are impossible."""
        x, tensors = inputs.x, [t for _, t in inputs.named()]
        if out is not None:
            check_tensor("out", out, tuple(x.shape), torch.bfloat16, x.device)
            check_out(out, x, inputs[1:3], inputs.weights)
        refuse_tangents(tensors)
        recording = records(tensors)
        if recording:
            self._check_recorded(inputs, out)
        return recording

    def _check_recorded(self, inputs: Inputs, out: Tensor | None) -> None:
        """Raise ArgumentError where the gradients of a call cannot be recorded."""
        if out is not None:
            raise ArgumentError("out", "given", "None while gradients are recorded")
        without = "torch.no_grad() or inference_mode(): "
        if inputs.x_scale is not None:
            raise ArgumentError("gradients", "recorded", without + "a quantized x has no gradient")
        if self._no_gradients is not None:
            raise ArgumentError("gradients", "recorded", without + self._no_gradients)
        for name in self._frozen(inputs):
            frozen = f"packed weights of precision {self.problem.precision!r} are frozen"
            raise ArgumentError(f"gradients of weights.{name}", "recorded", without + frozen)
        for name, t in inputs.named() if not torch.compiler.is_compiling() else ():
            if t.is_inference():  # autograd does not save it: the other ranks would wait
                expected = "its clone() outside of inference_mode(), where gradients are recorded"
                raise ArgumentError(name, "an inference tensor", expected)

    def _frozen(self, inputs: Inputs) -> list[str]:
        """Return the packed weights of a call that require gradients, which they never get."""
        given = {"w13": inputs.w13, "w2": inputs.w2} if self.problem.formats.packed else {}
        return [name for name, w in given.items() if w.requires_grad]

    def divide_weight_gradients(self, num_ranks: int) -> None:
        """Divide weight gradients by num_ranks in every later backward pass, see average_expert_gradients().

        Args:
            num_ranks: The divisor.
        """
        self._mean_over = num_ranks
        if self._runtime is not None:
            self._runtime.mean_over = num_ranks

    @property
    def num_delayed(self) -> int:
        """Number of backward passes that wait for backward_dw()."""
        return 0 if self._delayed is None else len(self._delayed)

    @uncompiled("backward_dw() is not seen by torch.compile: call it outside of the graph")
    def backward_dw(self, passes: int = 1) -> None:
        """Compute the weight gradients of the oldest waiting backward passes.

        They are added to grad or main_grad as the passes would have done, and hooks run. Collective: all ranks call it
        equally often, in the same order among their calls and backward passes. With delay_wgrad="keep" one launch sums
        up to 8 passes (fewer with more than 383 experts per rank) in fp32, adds them once and waits for no other rank;
        hooks run once. Equal passes give equal bits, which differ from those of passes added one by one.

        Args:
            passes: Number of passes. Default: 1.

        Raises:
            ConfigError: The layer has no delay_wgrad, or is closed.
            ArgumentError: Fewer passes wait, kept passes had different weights, or a saved tensor was changed in place.
            WorkspaceTooSmall: A kept pass filled its pool several times; its gradients are NaN. A later call may raise
                it.
        """
        if self._delayed is None:
            raise ConfigError("delay_wgrad", False, "True or 'keep', to call backward_dw()")
        self._delayed.make(runtime_of(self.handle), passes)

    def prepare(self, weights: ExpertWeights) -> None:
        """Open the backend, compile and quantize, as the first call would. Collective.

        Call it before torch.compile or graph capture.

        Args:
            weights: This rank's experts.
        """
        self._open(weights, "prepare()")

    @uncompiled(
        "a megamoe layer is made by prepare(): call it before torch.compile(fullgraph=True), "
        "and again after close()"
    )
    def _open(self, weights: ExpertWeights, call: str) -> None:
        """Do what prepare() does, as part of `call`, one of order.CALLS."""
        with self._lock:
            with self.ranks.together(call) if self._runtime is None else nullcontext():
                check_weights(self.problem, weights, None)
                if faked() or isinstance(weights.w13, FakeTensor):
                    expected = "memory: prepare() the layer before torch.export or FakeTensorMode"
                    raise ArgumentError("weights.w13", "a fake tensor, or beside them", expected)
            with lasting():
                if self._runtime is None:
                    over = {"num_ranks of average_expert_gradients()": self._mean_over}
                    where = self.problem, self.ranks, weights.w13.device
                    options, number = self._options, self._number
                    opening = Opening(self.backend, *where, options, call, number, over)
                    backend = open_backend(opening)
                    makes = self.options.transposes == "made" or self.options.gathers == "e4m3"
                    cache = QuantizedCache(makes)
                    own = self.problem, self.ranks, backend, cache
                    self._runtime = Runtime(*own, lock=self._lock)
                    self._runtime.mean_over = self._mean_over
                    cache.follows = self._follows
                self._keep(weights)
        self.ranks.met = False  # a call follows

    def _keep(self, weights: ExpertWeights) -> None:
        """Allocate on the weights' device what calls keep: they may be traced, captured or in inference_mode()."""
        assert self._runtime is not None
        self._runtime.backend.prepare(self._runtime.weights(weights))
        if self._delayed is not None and self._delayed.stashes:
            self._runtime.backend.prepare_stash()

    def __deepcopy__(self, memo: dict[int, Any]) -> Layer:
        """Return a new layer with the same arguments, not opened yet and with its own window. Collective."""
        group = ALONE if self.group is None else self.ranks
        new = Layer(self.problem, group, backend=self.backend, options=self.options)
        new._mean_over = self._mean_over
        return new

    def __getstate__(self) -> dict[str, Any]:
        """Return what pickling keeps: nothing that is open, and no number, which is valid in this process alone."""
        if self.group is not None:
            raise MegaMoEError(
                f"a layer over {self.problem.ep_size} ranks belongs to their process group and cannot be pickled: save "
                "its state_dict(), and make a layer on every rank to load it"
            )
        fresh = {"_runtime": None, "_signatures": Signatures(), "_delayed": self._new_delayed()}
        return self.__dict__ | fresh

    def _new_delayed(self) -> Delayed | None:
        if not self.options.delay_wgrad:
            return None
        return Delayed(self.accumulate_into_main_grad, self.options.delay_wgrad == "keep")

    @property
    def handle(self) -> Tensor:
        """The number of this layer in the operators. Raises ConfigError before prepare() and after close()."""
        if self._runtime is None:
            raise ConfigError("layer", "closed", "an open layer: call prepare() or the layer first")
        return self._runtime.handle

    def invalidate(self) -> None:
        """Quantize again at the next call, after writes that torch does not count; see megamoe.invalidate()."""
        if self._runtime is not None:
            self._runtime.cache.invalidate()

    def quantize(self, weights: ExpertWeights, follows: bool = False) -> None:
        """Quantize masters now if they changed since the last call, as the next call would. Not collective.

        A layer that is not open does nothing.

        Args:
            weights: This rank's experts.
            follows: True: from now on, this call follows every write to the weights. CUDA graphs then do not quantize
                at each call that they contain. Default: False.

        Raises:
            ArgumentError: A tensor does not fit the problem.
        """
        check_weights(self.problem, weights, None)
        self._follows |= follows
        if self._runtime is not None:
            with self._runtime.lock:
                self._runtime.cache.follows = self._follows
                self._runtime.weights(weights)

    def check(self) -> None:
        """Wait for the device, and raise the error of a failed launch if there is one."""
        if self._runtime is not None:
            self._runtime.backend.check()

    def statistics(self) -> Statistics:
        """Return statistics of the last call: routes per local expert, passes. It does not wait for the device.

        Call it after that call and before the next one of the same window, on the same stream. A CUDA graph may contain
        both.

        Returns:
            Statistics.

        Raises:
            MegaMoEError: There was no call.
        """
        return Statistics.of_last(
            None if self._runtime is None else self._runtime.backend.statistics()
        )

    @property
    def window_problem(self) -> Problem:
        """The problem that determines the window; over several hosts, of an open layer, the problem inside one host."""
        inside: Problem = getattr(self._runtime and self._runtime.backend, "inside", self.problem)
        return inside

    @property
    def pool_rows(self) -> int | None:
        """Rows of the backend's pool; before the layer is open, the option `pool_rows`, None: the default."""
        plan = getattr(self._runtime and self._runtime.backend, "plan", None)
        return self._options.get("pool_rows") if plan is None else plan.pool_rows

    def reset(self) -> None:
        """Make the backend usable again after a failed launch. Collective.

        It affects all layers that share the window or the hosts. Results of calls in flight are lost.
        """
        self.ranks.begin("reset()")
        if self._runtime is not None:
            self._runtime.backend.reset()

    @property
    def is_open(self) -> bool:
        """True between prepare(), or the first call, and close()."""
        return self._runtime is not None

    @property
    def needs_close(self) -> bool:
        """True if close() has to free memory together with other ranks."""
        return self._runtime is not None and self._runtime.backend.needs_close

    def close(self) -> None:
        """Free the backend and the window, after a barrier of the group. The next call opens them again."""
        runtime = self._runtime
        if runtime is None:
            return
        try:
            self.ranks.begin("close()")  # a barrier that says who comes for something else
        except ValueError as error:  # of torch.distributed
            destroyed = "the process group of a layer was destroyed: close() layers before destroy_process_group()"
            raise MegaMoEError(destroyed) from error
        self._runtime = None
        self._signatures = Signatures()
        if self._delayed is not None and len(self._delayed):
            waiting = len(self._delayed)
            self._delayed.forget(waiting)
            message = f"close() while {waiting} backward passes wait for backward_dw(): their weight gradients are lost"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
        runtime.backend.close()
