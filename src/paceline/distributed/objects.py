"""Object collectives that send JSON and tensors. torch's own send pickles, which can execute code when loaded.

Neither gloo nor NCCL authenticates its peers, so everything received is validated.
"""

import json
import math
from typing import Any

import torch
import torch.distributed as dist

from paceline.errors import UserError
from paceline.system.trees import flatten, unflatten

_MAX_BYTES = 256 << 20
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}


def broadcast_object(value: Any, src: int, rank: int) -> Any:
    """Return the value of rank `src` on every rank: None, bool, int, float, str, tensors, lists and dicts of them."""
    skeleton, tensors = flatten(value) if rank == src else (None, {})
    specs = [[name, str(each.dtype).removeprefix("torch."), list(each.shape)] for name, each in tensors.items()]
    text = json.dumps([skeleton, specs]).encode()
    size = torch.tensor([len(text)])
    dist.broadcast(size, src)
    content = _bytes(text) if rank == src else torch.empty(_checked(int(size), src), dtype=torch.uint8)
    dist.broadcast(content, src)
    if rank == src:
        for tensor in tensors.values():
            dist.broadcast(_as_bytes(tensor.contiguous().cpu()), src)
        return value
    skeleton, announced = _skeleton_and_specs(content, src)
    received = {}
    for name, dtype, shape in announced:
        received[name] = _empty(dtype, shape, src)
        dist.broadcast(_as_bytes(received[name]), src)
    return _rebuilt(skeleton, received, src)


def all_gather_object(value: Any, size: int) -> list[Any]:
    """Return the values of all ranks, in rank order, on every rank. Tensors are not supported."""
    text = json.dumps(flatten(value)[0]).encode()
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(text)]))
    checked = [_checked(int(length), rank) for rank, length in enumerate(lengths)]
    contents = [torch.empty(max(checked), dtype=torch.uint8) for _ in range(size)]
    dist.all_gather(contents, _bytes(text.ljust(max(checked))))
    return [_rebuilt(_parsed(contents[rank][:length], rank), {}, rank) for rank, length in enumerate(checked)]


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a contiguous tensor, because gloo does not support all types."""
    return tensor.view(-1).view(torch.uint8)


def _bytes(text: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _checked(length: int, rank: int) -> int:
    if not 0 < length <= _MAX_BYTES:
        raise _invalid(rank, f"{length} bytes")
    return length


def _parsed(content: torch.Tensor, rank: int) -> Any:
    try:
        return json.loads(content.numpy().tobytes())
    except (ValueError, RecursionError) as error:
        raise _invalid(rank, str(error)) from None


def _skeleton_and_specs(content: torch.Tensor, rank: int) -> tuple[Any, list[Any]]:
    match _parsed(content, rank):
        case [skeleton, list(specs)] if all(map(_is_spec, specs)):
            return skeleton, specs
    raise _invalid(rank, "neither a value nor tensors")


def _is_spec(spec: Any) -> bool:
    match spec:
        case [str(), str(), list()]:
            return True
    return False


def _rebuilt(skeleton: Any, tensors: dict[str, torch.Tensor], rank: int) -> Any:
    try:
        return unflatten(skeleton, tensors)
    except (ValueError, RecursionError) as error:
        raise _invalid(rank, str(error)) from None


def _empty(dtype: str, shape: list[int], rank: int) -> torch.Tensor:
    if dtype not in _DTYPES or not all(isinstance(length, int) and 0 <= length < 1 << 40 for length in shape):
        raise _invalid(rank, f"a tensor of {dtype} {shape}")
    if math.prod(shape) * _DTYPES[dtype].itemsize > 1 << 42:
        raise _invalid(rank, f"a tensor of {shape}")
    return torch.empty(shape, dtype=_DTYPES[dtype])


def _invalid(rank: int, what: str) -> UserError:
    return UserError(
        "invalid-rank-message",
        f"rank {rank} sent data that no rank of this job sends ({what}). Another process on the network may "
        "impersonate it: restrict access to the ports of the nodes (see SECURITY.md).",
        rank=rank,
    )
