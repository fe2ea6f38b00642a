"""The tensors of a checkpoint: safetensors files, each with whole tensors or with one rank's chunks of them.

    model.safetensors                      one rank holds everything (single, DDP)
    model-00002-of-00004.safetensors       the chunks of one of four ranks (FSDP)

The header of a file has the place of every chunk in its tensor, as JSON under "chunks". torch.distributed.checkpoint
computes which chunk a rank holds and which slices it needs; its own files and messages are not used, because they are
pickles. Nothing in a header is trusted: chunks must be of one type and cover their tensor exactly once.
"""

import json
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors
import torch

from paceline.checkpoint import schema
from paceline.distributed.mesh import ShardId

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_CHUNKS = "chunks"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class TensorChunk:
    """A part of a tensor."""

    data: torch.Tensor
    shape: tuple[int, ...]
    """Of the whole tensor."""
    offsets: tuple[int, ...]


def file_name(part: str, shard: ShardId) -> str:
    """Return the name of the file with one shard of a part of a checkpoint."""
    number = f"-{shard.index + 1:05d}-of-{shard.count:05d}" if shard.count > 1 else ""
    return f"{part}{number}.safetensors"


def own_chunk(tensor: torch.Tensor, shard: ShardId) -> torch.Tensor | TensorChunk | None:
    """Return what this rank writes of a tensor, not copied, or None. A collective for partial sums, which are rare."""
    if not hasattr(tensor, "device_mesh"):
        return tensor if shard == ShardId(0, shard.count) else None  # the same on all ranks
    from torch.distributed.checkpoint import DefaultSavePlanner  # imported late because it takes a second

    if any(placement.is_partial() for placement in _placements(tensor)):
        return own_chunk(tensor.full_tensor(), shard)  # type: ignore[attr-defined]
    if not any(placement.is_shard() for placement in _placements(tensor)):
        return own_chunk(tensor.to_local(), shard)  # type: ignore[attr-defined]
    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner({"": tensor}, is_coordinator=True)
    [item] = planner.create_local_plan().items
    assert item.tensor_data is not None
    data, place = planner.resolve_data(item), item.tensor_data
    assert isinstance(data, torch.Tensor)
    if not shard.is_first_replica or not data.numel():
        return None
    return TensorChunk(data, tuple(place.size), tuple(place.chunk.offsets))


def _placements(tensor: Any) -> Sequence[Any]:
    placements: Sequence[Any] = tensor.placements
    return placements


def header(chunks: dict[str, TensorChunk]) -> dict[str, str]:
    """Return the metadata of a safetensors file with these chunks."""
    places = {name: {"shape": chunk.shape, "offsets": chunk.offsets} for name, chunk in chunks.items()}
    return {"format": "pt", _CHUNKS: json.dumps(places)} if places else {"format": "pt"}


@dataclass(frozen=True)
class _StoredChunk:
    file: Any
    """An open safetensors file."""
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]


@dataclass(frozen=True)
class SavedTensor:
    """A tensor of a checkpoint, not read yet."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    chunks: tuple[_StoredChunk, ...]

    def read(self) -> torch.Tensor:
        """Return the whole tensor in host memory."""
        if len(self.chunks) == 1:
            whole: torch.Tensor = self.chunks[0].file.get_tensor(self.name)
            return whole
        return self.read_into(torch.empty(self.shape, dtype=self.dtype))

    def read_into(self, target: torch.Tensor) -> torch.Tensor:
        """Fill a whole tensor, chunk by chunk, and return it."""
        for chunk in self.chunks:
            part = target
            for axis, (begin, length) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                part = part.narrow(axis, begin, length)
            part.copy_(chunk.file.get_tensor(self.name))
        return target


def open_files(paths: Iterable[Path]) -> dict[str, SavedTensor]:
    """Return the tensors in the files of one part of a checkpoint by name; ValueError if they are not complete."""
    found: dict[str, list[tuple[torch.dtype, torch.Size, _StoredChunk]]] = {}
    for path in paths:
        try:
            file: Any = safetensors.safe_open(path, "pt")
            shapes = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a dictionary)
            sizes = {name: (_DTYPES[part.get_dtype()], tuple(part.get_shape())) for name, part in shapes.items()}
            places = json.loads((file.metadata() or {}).get(_CHUNKS, "{}"))
        except Exception as error:  # safetensors raises many types for an untrusted header
            raise ValueError(f"{path.name} is not a valid safetensors file ({str(error)[:200]})") from None
        schema.check_chunks(places)
        if unknown := places.keys() - sizes.keys():
            raise ValueError(f"{path.name} has no tensor {min(unknown)!r}")
        for name, (dtype, size) in sizes.items():
            place = places.get(name, {"shape": size, "offsets": [0] * len(size)})
            stored = _StoredChunk(file, size, tuple(place["offsets"]))
            found.setdefault(name, []).append((dtype, torch.Size(place["shape"]), stored))
    return {name: _assembled(name, chunks) for name, chunks in found.items()}


def _assembled(name: str, found: list[tuple[torch.dtype, torch.Size, _StoredChunk]]) -> SavedTensor:
    """Return a tensor whose chunks have been checked: slices along one axis, without gaps or overlaps."""
    dtype, shape, _ = found[0]
    if any((other, size) != (dtype, shape) for other, size, _ in found):
        raise ValueError(f"the chunks of tensor {name!r} have different types or shapes")
    chunks = sorted((chunk for _, _, chunk in found), key=lambda chunk: chunk.offsets)
    axis = next((axis for axis in range(len(shape)) if chunks[0].sizes[axis : axis + 1] != shape[axis : axis + 1]), 0)
    end = 0
    for chunk in chunks:
        sizes, offsets = list(chunk.sizes), list(chunk.offsets)
        if len(sizes) != len(shape) or len(offsets) != len(shape):
            raise ValueError(f"the chunks of tensor {name!r} have different numbers of dimensions")
        if shape and offsets.pop(axis) != end:
            raise ValueError(f"the chunks of tensor {name!r} overlap or leave a gap")
        end += sizes.pop(axis) if shape else 1
        if any(offsets) or sizes != [*shape[:axis], *shape[axis + 1 :]]:
            raise ValueError(f"the chunks of tensor {name!r} are not slices along one axis")
    if end != (shape[axis] if shape else 1) or (len(chunks) > 1 and not math.prod(shape)):
        raise ValueError(f"the chunks of tensor {name!r} do not cover it")
    return SavedTensor(name, shape, dtype, tuple(chunks))


@torch.no_grad()
def fill(saved: dict[str, SavedTensor], targets: dict[str, torch.Tensor]) -> None:
    """Read tensors into others of the same shape and type. A rank reads only its own part of a sharded one."""
    sharded = {name: target for name, target in targets.items() if hasattr(target, "device_mesh")}
    for name, target in targets.items():
        if name not in sharded:
            saved[name].read_into(target)
    if sharded:
        _fill_shards(saved, sharded)


def _fill_shards(saved: dict[str, SavedTensor], targets: dict[str, Any]) -> None:
    import torch.distributed.checkpoint as dcp  # imported late because it takes a second

    from paceline.checkpoint.slices import SliceReader

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # every rank reads by itself
        planner = dcp.DefaultLoadPlanner(flatten_state_dict=False)
        dcp.load(targets, storage_reader=SliceReader(saved), planner=planner, no_dist=True)


def materialize(tree: Any, place: Callable[[SavedTensor], torch.Tensor] = SavedTensor.read) -> Any:
    """Return a tree with every saved tensor replaced by what `place` returns for it."""
    if isinstance(tree, SavedTensor):
        return place(tree)
    if isinstance(tree, dict):
        return {key: materialize(value, place) for key, value in tree.items()}
    return [materialize(value, place) for value in tree] if isinstance(tree, list) else tree


def read_like(saved: SavedTensor, like: "DTensor | torch.Tensor | None") -> torch.Tensor:
    """Return a saved tensor, sharded like another one of the same shape and type, and otherwise whole."""
    if not hasattr(like, "device_mesh") or (like.shape, like.dtype) != (saved.shape, saved.dtype):  # type: ignore[union-attr]
        return saved.read()
    assert like is not None
    target = torch.empty_like(like)
    fill({saved.name: saved}, {saved.name: target})
    return target.detach()
