"""Values between ranks: JSON, and tensors beside it. torch's own object collectives send pickles, which run code.

Neither gloo nor NCCL knows who sends, so whatever arrives is checked.
"""

import json
import math
from typing import Any

import torch
import torch.distributed as dist

from paceline.errors import UserError
from paceline.system.trees import flatten, unflatten

_LONGEST = 256 << 20
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}


def broadcast_object(value: Any, src: int, rank: int) -> Any:
    """The value of rank `src`, on every rank: None, bool, int, float, str, lists, dictionaries and tensors of these."""
    skeleton, tensors = flatten(value) if rank == src else (None, {})
    forms = [[name, str(own.dtype).removeprefix("torch."), list(own.shape)] for name, own in tensors.items()]
    text = json.dumps([skeleton, forms]).encode()
    size = torch.tensor([len(text)])
    dist.broadcast(size, src)
    content = _bytes(text) if rank == src else torch.empty(_checked(int(size), src), dtype=torch.uint8)
    dist.broadcast(content, src)
    if rank == src:
        for own in tensors.values():
            dist.broadcast(own.contiguous().cpu(), src)
        return value
    skeleton, announced = _skeleton_and_forms(content, src)
    received = {}
    for name, dtype, shape in announced:
        received[name] = _empty(dtype, shape, src)
        dist.broadcast(received[name], src)
    return _rebuilt(skeleton, received, src)


def all_gather_object(value: Any, size: int) -> list[Any]:
    """Every rank's value, in order of rank, on every rank; without tensors."""
    text = json.dumps(flatten(value)[0]).encode()
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(text)]))
    checked = [_checked(int(length), rank) for rank, length in enumerate(lengths)]
    contents = [torch.empty(max(checked), dtype=torch.uint8) for _ in range(size)]
    dist.all_gather(contents, _bytes(text.ljust(max(checked))))
    return [_rebuilt(_parsed(contents[rank][:length], rank), {}, rank) for rank, length in enumerate(checked)]


def _bytes(text: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _checked(length: int, rank: int) -> int:
    if not 0 < length <= _LONGEST:
        raise _stranger(rank, f"{length} bytes")
    return length


def _parsed(content: torch.Tensor, rank: int) -> Any:
    try:
        return json.loads(content.numpy().tobytes())
    except (ValueError, RecursionError) as error:
        raise _stranger(rank, str(error)) from None


def _skeleton_and_forms(content: torch.Tensor, rank: int) -> tuple[Any, list[Any]]:
    match _parsed(content, rank):
        case [skeleton, list(forms)] if all(map(_is_form, forms)):
            return skeleton, forms
    raise _stranger(rank, "neither a value nor tensors")


def _is_form(form: Any) -> bool:
    match form:
        case [str(), str(), list()]:
            return True
    return False


def _rebuilt(skeleton: Any, tensors: dict[str, torch.Tensor], rank: int) -> Any:
    try:
        return unflatten(skeleton, tensors)
    except (ValueError, RecursionError) as error:
        raise _stranger(rank, str(error)) from None


def _empty(dtype: str, shape: list[int], rank: int) -> torch.Tensor:
    if dtype not in _DTYPES or not all(isinstance(length, int) and 0 <= length < 1 << 40 for length in shape):
        raise _stranger(rank, f"a tensor of {dtype} {shape}")
    if math.prod(shape) * _DTYPES[dtype].itemsize > 1 << 42:
        raise _stranger(rank, f"a tensor of {shape}")
    return torch.empty(shape, dtype=_DTYPES[dtype])


def _stranger(rank: int, what: str) -> UserError:
    return UserError(
        f"rank {rank} sent something that is not of this job ({what}): another process of this network may have taken "
        "its place; let nobody else reach the ports of the nodes (SECURITY.md)"
    )
