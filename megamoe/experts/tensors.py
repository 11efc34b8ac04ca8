"""Which experts a tensor holds: a tensor that knows it, for state dicts and checkpoints of torch.distributed (DCP)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megamoe.core.errors import ArgumentError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


def is_fsdp(module: torch.nn.Module) -> bool:
    """Whether FSDP2's fully_shard() was called on this very module."""
    if "torch.distributed.fsdp" not in sys.modules:
        return False
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


class Experts(torch.Tensor):
    """Rows [begin, begin + shape[0]) of a tensor over `total` experts. What is computed of it by rows is one, too."""

    begin: int
    total: int

    @staticmethod
    def of(local: Tensor, begin: int, total: int) -> Experts:
        """local: [n, ...], the experts from `begin` on, shared and not copied."""
        experts = local.as_subclass(Experts)
        experts.begin, experts.total = begin, total
        return experts

    def local(self) -> Tensor:
        """Return the same memory as a plain tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        given = [*args, *(kwargs or {}).values()]
        if isinstance(result, (list, tuple)) and all(isinstance(r, Tensor) for r in result):
            rows = [g for g in given if isinstance(g, (list, tuple)) and len(g) == len(result)]
            made = [_like(r, [g[i] for g in rows] + given) for i, r in enumerate(result)]
            return made if type(result) is list else result if not made else type(result)(made)
        if not isinstance(result, Tensor):
            return result
        if func is Tensor.__getitem__ and (begin := _first(args[1], args[0].shape[0])) is not None:
            return Experts.of(result, args[0].begin + begin, args[0].total)
        # of nothing: what stages a state dict for writing makes buffers so
        staged = func is Tensor.new_empty and not result.dim()
        return Experts.of(result, args[0].begin, args[0].total) if staged else _like(result, given)

    def size(self, dim: int | None = None) -> Any:
        """Return the shape; to DCP's planner, which compares it with the checkpoint's, that of all experts."""
        caller = sys._getframe(1).f_code.co_name
        if caller == "tensor_func":  # of _create_cpu_state_dict: it would forget which these are
            raise ArgumentError(
                "stager", "BlockingAsyncStager", "dcp.async_save()'s own, or distribute()"
            )
        first = self.total if caller == "create_default_local_load_plan" else self.shape[0]
        sizes = torch.Size((first, *self.shape[1:])) if self.dim() else self.shape
        return sizes if dim is None else sizes[dim]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # torch's has no types
        end = self.begin + self.shape[0]
        return f"Experts([{self.begin}, {end}) of {self.total}, {self.local()!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Become a plain tensor in a file of torch.save, with a note that Place.take() reads."""
        plain: Any = self.local()
        plain.megamoe_experts = [self.begin, self.total]
        return plain.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Experts:
        return Experts.of(self.local().clone(), self.begin, self.total)

    # the protocol that DCP asks of a tensor that knows its place

    def _chunk(self) -> ChunkStorageMetadata:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        offsets = torch.Size((self.begin, *[0] * (self.dim() - 1)))
        return ChunkStorageMetadata(offsets, torch.Size(self.shape))

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        if not self.shape[0]:
            return []
        chunk, properties = self._chunk(), TensorProperties.create_from_tensor(self.local())
        sizes = torch.Size((self.total, *self.shape[1:]))
        data = TensorWriteData(chunk=chunk, properties=properties, size=sizes)
        index = MetadataIndex(fqn, chunk.offsets)
        return [WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk()] if self.shape[0] else []

    def __get_tensor_shard__(self, _: MetadataIndex) -> Tensor:
        return self.local()


def _like(result: Tensor, given: Sequence[Any]) -> Tensor:
    """Return the result of an operation as Experts, where it has as many rows as one of the tensors given.

    What was written in place stays what it is, but for a plain tensor: `torch.empty(v.shape).copy_(v)` are experts.
    """
    if isinstance(result, (Experts, torch.nn.Parameter)) and any(g is result for g in given):
        return result
    for source in given:
        if isinstance(source, Experts) and result.dim() and result.shape[:1] == source.shape[:1]:
            return Experts.of(result, source.begin, source.total)
    return result.as_subclass(torch.Tensor)


def _first(index: Any, rows: int) -> int | None:
    """Return the first row that an index of a range of rows takes; None for other indices."""
    first = index[0] if isinstance(index, tuple) and index else index
    if not isinstance(first, slice):
        return None
    begin, _, step = first.indices(rows)
    return begin if step == 1 else None


def noted(value: Any) -> tuple[int, int] | None:
    """Return (first expert, E) of a tensor that knows it, also out of a file of torch.save; else None."""
    if isinstance(value, Experts):
        return value.begin, value.total
    note = getattr(value, "megamoe_experts", None)
    return None if note is None else (int(note[0]), int(note[1]))
