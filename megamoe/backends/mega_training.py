"""The launches of a step that trains: `train`, the forward that saves, and `backward`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megamoe.backends.gradients import Targets
from megamoe.backends.kernels import LayerKernels, check_rows, weights_key
from megamoe.core.errors import ArgumentError, MegaMoEError
from megamoe.formats.weights import ExpertWeights, TurnedWeights, check_tensor
from megamoe.jit.source import Variant
from megamoe.launch.arguments import fill_call, fill_weights
from megamoe.launch.launches import launch_lock, launch_order
from megamoe.launch.training import (
    fill_backward,
    fill_backward_call,
    fill_backward_weights,
    fill_gradients,
    fill_train_state,
)

ALIGNMENT = 16  # of what TMA and vector loads read


class Training:
    """Both kernels of one layer, each with its argument block, and the workspace of backward. Not collective.

    The methods launch on the current stream of the current device, which is the layer's, and wait for nothing.
    """

    def __init__(self, kernels: LayerKernels, variant: Variant) -> None:
        from megamoe.jit.driver import use_device
        from megamoe.jit.tensormap import encode

        # For maps, in threads that have not touched the device yet, as autograd's may not have.
        self._use_device = partial(use_device, kernels.window.device.index or 0)
        self._plan, self._window, self._layer = kernels.plan, kernels.window, kernels.layer
        self._encode = encode
        self._device = self._window.device
        self._order = launch_order(self._device.index or 0)
        both = [replace(variant, kernel=name) for name in ("train", "backward")]
        kernels.build(*both)
        self._train, self._backward = map(kernels.load, both)
        self.workspace = self._window.backward_workspace(self._plan)
        fill_backward(self._backward.argument, self._plan, self.workspace.data_ptr(), encode)
        place = self._plan.state["chunk_prefix"]
        behind = self._window.workspace(self._plan)[self._plan.state_offset :]
        self._routes = behind[place.offset : place.end]  # bytes
        self._keys: dict[str, tuple[Any, ...]] = {}  # kernel -> key of the weights that it has
        self._kept: dict[str, ExpertWeights] = {}  # copies of biases must live as long
        # Memory of the state of the last train launch. Weak: autograd frees it.
        self._state: StorageWeakRef | None = None

    def state_views(self) -> dict[str, Tensor]:
        """Return the regions of the state that the last train launch made."""
        storage = self._state and torch.UntypedStorage._new_with_weak_ptr(self._state.cdata)
        if storage is None:
            raise MegaMoEError("the last call trained, and its state is gone: ask before y is")
        state = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
        return {name: region.view(state) for name, region in self._plan.train_state.items()}

    def rows(self) -> dict[str, Tensor]:
        """Return what a backward launch of a single pass left by pool row; see MegaBackend.intermediates."""
        workspace = self._plan.views(self._window.workspace(self._plan))
        found = {n: r.view(self.workspace) for n, r in self._plan.backward.items()}
        by_row = {"dy_rows": workspace["x_pool"], "hs": workspace["h"]} | found
        by_row |= {"dgu": found["dgu"].flatten(1), "dx_rows": workspace["y_rows"]}
        by_row["route_rows"] = workspace["route_rows"]
        names = ("dy_rows", "dgu", "hs", "d_s", "dx_rows", "x_rows", "row_weight", "route_rows")
        return {name: by_row[name] for name in names}

    def forward(
        self,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        weights: ExpertWeights,
        num_tokens_device: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return y [T, H] bf16 and the state of the call; see MegaBackend.forward_train."""
        check_rows(self._plan.problem, self._device, x, topk_ids, topk_weights)
        self._use_device()
        args = self._train.argument
        with launch_lock:
            self._set_train_weights(weights)
            y = torch.empty_like(x)
            state = torch.empty(
                self._plan.train_state_bytes, dtype=torch.uint8, device=self._device
            )
            fill_train_state(args, self._plan, state.data_ptr(), self._encode)
            fill_call(args, x, topk_ids, topk_weights, y, num_tokens_device)
            self._launch(
                self._train, "train", (x, topk_ids, topk_weights, y, state, num_tokens_device)
            )
            self._state = StorageWeakRef(state.untyped_storage())
        return y, state

    def backward(
        self,
        dy: Tensor,
        x: Tensor,
        topk_ids: Tensor,
        weights: ExpertWeights,
        state: Tensor,
        needs: Sequence[bool],
        num_tokens_device: Tensor | None,
        into: Mapping[str, Tensor] | None,
        only_weights: bool,
        turned: TurnedWeights | None,
    ) -> list[Tensor | None]:
        """Return the gradients, see MegaBackend.backward."""
        self._check(dy, x, topk_ids, state, num_tokens_device)
        self._use_device()
        need_x, need_scores, *need_weights = needs
        if only_weights and (need_x or need_scores):
            raise ArgumentError(
                "needs", list(needs), "no dx and no d_topk_weights with only_weights"
            )
        args = self._backward.argument
        make = torch.empty if num_tokens_device is None else torch.zeros  # rows behind have none
        dx = make(x.shape, dtype=torch.bfloat16, device=self._device)
        d_scores = make(topk_ids.shape, dtype=torch.float32, device=self._device)
        with launch_lock:
            self._set_backward_weights(weights, turned)
            for name, need in zip(("w13", "w2"), need_weights, strict=False):
                dtype = getattr(weights, name).dtype
                if need and dtype != torch.bfloat16:
                    raise ArgumentError(
                        f"weights.{name}.dtype", dtype, "bf16, of what has gradients"
                    )
            targets = Targets.make(weights, need_weights, into)
            fill_train_state(args, self._plan, state.data_ptr(), self._encode)
            fill_gradients(args, self._plan, self._encode, **targets.arguments)
            fill_backward_call(
                args,
                dy=dy,
                x=x,
                topk_ids=topk_ids,
                dx=dx,
                d_topk_weights=d_scores,
                num_tokens_device=num_tokens_device,
                only_weights=only_weights,
            )
            tensors = (dy, x, topk_ids, state, dx, d_scores, num_tokens_device)
            self._launch(self._backward, "backward", tensors)
            self._keep_routes(state)
        return [dx if need_x else None, d_scores if need_scores else None, *targets.results()]

    def _launch(self, launcher: Any, kernel: str, tensors: Sequence[Tensor | None]) -> None:
        handle = self._order.before_launch()
        launcher.launch(handle)
        self._window.last_launch = self._layer, kernel
        if handle:  # not the default stream
            for tensor in tensors:
                if tensor is not None and tensor.is_cuda:
                    tensor.record_stream(self._order.stream)

    def _set_train_weights(self, weights: ExpertWeights) -> None:
        """Point the train launch at what forward has."""
        w = weights if weights.b13 is None else weights.with_flat_bias()
        key = weights_key(w)
        if self._keys.get("train") == key:
            return
        self._keys.pop("train", None)  # until all is filled
        w.validate(self._plan.problem, self._device)
        fill_weights(self._train.argument, self._plan, w, self._encode)
        self._keep("train", key, w)

    def _set_backward_weights(self, weights: ExpertWeights, turned: TurnedWeights | None) -> None:
        """Point the backward launch at the masters, or in FP8 at what stands in for them."""
        scaled = self._plan.problem.formats.w.scaled
        if scaled != (turned is not None):
            value = None if turned is None else "given"
            raise ArgumentError(
                "turned", value, "TurnedWeights of these weights with precision 'fp8', else None"
            )
        w = weights if turned is None else turned.forward
        w = w if w.b13 is None else w.with_flat_bias()
        key = weights_key(w)
        if turned is not None:
            key += weights_key(weights) + tuple(t.data_ptr() for t in turned.named().values())
        if self._keys.get("backward") == key:
            return
        self._keys.pop("backward", None)  # until all is filled
        problem, args = self._plan.problem, self._backward.argument
        masters = replace(problem, precision="bf16") if weights.w13_scale is None else problem
        weights.validate(masters, self._device)
        if turned is not None:
            turned = replace(turned, forward=w)
            turned.validate(problem, self._device)
        fill_backward_weights(args, self._plan, w if turned is None else turned, self._encode)
        self._keep("backward", key, w)

    def _keep(self, kernel: str, key: tuple[Any, ...], w: ExpertWeights) -> None:
        self._keys[kernel], self._kept[kernel] = key, replace(w, w13=w.w13[:0], w2=w.w2[:0])

    def _keep_routes(self, state: Tensor) -> None:
        """Copy what statistics() reads into the workspace: the state of the call goes after its backward.

        After the launch, which waited for those on other streams that have their routes there.
        """
        place = self._plan.train_state["chunk_prefix"]
        self._routes.copy_(state[place.offset : place.end])

    def _check(
        self,
        dy: Tensor,
        x: Tensor,
        topk_ids: Tensor,
        state: Tensor,
        num_tokens_device: Tensor | None,
    ) -> None:
        p, device = self._plan.problem, self._device
        if not isinstance(x, Tensor) or x.dim() != 2 or x.shape[0] > p.max_tokens:
            value = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ArgumentError("x.shape", value, f"[T <= {p.max_tokens}, {p.hidden}]")
        tokens = x.shape[0]
        check_tensor("x", x, (tokens, p.hidden), torch.bfloat16, device)
        check_tensor("dy", dy, (tokens, p.hidden), torch.bfloat16, device)
        check_tensor("topk_ids", topk_ids, (tokens, p.top_k), (torch.int32, torch.int64), device)
        check_tensor("state", state, (self._plan.train_state_bytes,), torch.uint8, device)
        if num_tokens_device is not None:
            check_tensor("num_tokens_device", num_tokens_device, (1,), torch.int32, device)
        for name, tensor in (("dy", dy), ("x", x), ("state", state)):
            if tensor.data_ptr() % ALIGNMENT:
                raise ArgumentError(
                    name, hex(tensor.data_ptr()), f"{ALIGNMENT}-byte aligned storage"
                )
