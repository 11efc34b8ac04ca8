"""Define `ExpertRows`: rows of a tensor over all experts that DTensor cannot describe, for state dicts and DCP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megamoe.core.errors import ArgumentError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


class ExpertRows(torch.Tensor):
    """Stand for a tensor over `total` experts with rows [begin, begin + len(local)) alone; it has no operations.

    DTensor splits 60 experts over 8 ranks into 8, 8, 8, 8, 8, 8, 8, 4, the layer into 8, 8, 8, 8, 7, 7, 7, 7.
    ShardedTensor can describe this, but torch's full state dicts pad its parts like those of DTensor. DCP reads and
    writes these rows by DTensor's protocol. Every operation that would need all experts raises.
    """

    local: Tensor
    begin: int
    total: int

    @staticmethod
    def __new__(cls, local: Tensor, begin: int, total: int) -> ExpertRows:
        """local: [n, ...], the rows from `begin` on, shared and not copied."""
        rows: ExpertRows = torch.Tensor._make_wrapper_subclass(
            cls, (total, *local.shape[1:]), dtype=local.dtype, device=local.device
        )
        rows.local, rows.begin, rows.total = local.detach(), begin, total
        return rows

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's has no types
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        aten, rows = torch.ops.aten, args[0]
        if func in (aten.detach.default, aten.clone.default, aten._to_copy.default):
            return cls(func(rows.local, *args[1:], **kwargs or {}), rows.begin, rows.total)
        raise _refused(str(func))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # torch's has no types
        end = self.begin + self.local.shape[0]
        return f"ExpertRows([{self.begin}, {end}) of {self.total}, {self.local!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise ArgumentError: the file would hold one rank's experts even where all are requested."""
        raise _refused("pickle")

    # the protocol that DCP asks of a tensor that knows its place

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        offsets = torch.Size((self.begin, *[0] * (self.dim() - 1)))
        sizes = self.local.shape
        return [ChunkStorageMetadata(offsets, sizes)] if sizes[0] else []

    def __get_tensor_shard__(self, _: MetadataIndex) -> Tensor:
        return self.local


def _refused(user: str) -> ArgumentError:
    expected = (
        "dcp.save(), dcp.load() or load_state_dict(): no DTensor describes experts that ranks do not divide, or of "
        "FSDP2 on a mesh that does not have the layer's group as a dimension"
    )
    return ArgumentError("ExpertRows of a state dict", f"used by {user}", expected)
