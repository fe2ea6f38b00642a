"""The native code: JPEGs to records, and crops of records, many at a time. native/codec.h is its table of contents."""

import ctypes
import os
import weakref
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np

from paceline.errors import UserError

_POINTER, _SIZE, _INT, _LONG = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int64
_PATHS = ("portable", "avx2")  # in the native code's order; the last one that runs here is the fastest
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "text": (ctypes.c_char_p, [_INT]),
    "overrun": (_INT, []),
    "has_path": (_INT, [_INT]),
    "free": (None, [_POINTER]),
    "pack": (_INT, [ctypes.c_char_p, _SIZE, _POINTER, _POINTER]),
    "describe": (_INT, [_POINTER, _SIZE, _INT, _POINTER]),
    "unpack": (_INT, [_POINTER, _SIZE, _POINTER, _POINTER]),
    "workspace": (_POINTER, []),
    "workspace_free": (None, [_POINTER]),
    "random_boxes": (None, [_POINTER, _POINTER, _LONG, _POINTER, _POINTER, _INT, _POINTER]),
    "crop": (
        _INT,
        [_POINTER, _INT, _POINTER, _LONG, _POINTER, _POINTER, _LONG, _INT, _INT, _INT, _POINTER, _POINTER],
    ),
}


class CodecError(ValueError):
    """What the codec refuses; the message says why."""


class _Native:
    """The functions of the shared library that the package's build made."""

    def __init__(self) -> None:
        found = find_spec("paceline.data._native")
        if found is None or not found.origin:
            raise UserError("paceline's native codec is not built; install the package again, with a C compiler")
        library = ctypes.CDLL(found.origin)
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(library, f"paceline_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)

    def __getattr__(self, name: str) -> Any:  # for type checkers: the functions are set above
        raise AttributeError(name)


_native = _Native()
OVERRUN: int = _native.overrun()
"""Bytes that must be readable behind a record."""


def paths() -> list[str]:
    """The ways to compute that this processor has, all with the same result, the fastest one last."""
    return [name for number, name in enumerate(_PATHS) if _native.has_path(number)]


def _path(name: str = "") -> int:
    """The path of this name; by default the one in PACELINE_CODEC_PATH, or the fastest."""
    name = name or os.environ.get("PACELINE_CODEC_PATH", "") or paths()[-1]
    if name not in paths():
        raise UserError(f"codec path {name!r} is not one of {', '.join(paths())}, which this processor has")
    return _PATHS.index(name)


def _check(status: int) -> None:
    if status:
        raise CodecError(reason(status))


def reason(status: int) -> str:
    text: bytes = _native.text(status)
    return text.decode()


def _taken(pointer: ctypes.c_void_p, length: ctypes.c_size_t) -> bytes:
    """Copy what the native code allocated."""
    try:
        return ctypes.string_at(pointer, length.value)
    finally:
        _native.free(pointer)


def pack(jpeg: bytes) -> bytes:
    """A baseline JPEG to a record; CodecError for what is none."""
    record, length = ctypes.c_void_p(), ctypes.c_size_t()
    _check(_native.pack(jpeg, len(jpeg), ctypes.byref(record), ctypes.byref(length)))
    return _taken(record, length)


def unpack(record: bytes) -> bytes:
    """A record to a baseline JPEG with the same coefficients."""
    jpeg, length = ctypes.c_void_p(), ctypes.c_size_t()
    padded = record + bytes(OVERRUN)
    _check(_native.unpack(padded, len(record), ctypes.byref(jpeg), ctypes.byref(length)))
    return _taken(jpeg, length)


def describe(record: bytes, path: str = "") -> tuple[int, int, int]:
    """Verify a record; its width, height and number of components."""
    shape = (ctypes.c_int32 * 3)()
    _check(_native.describe(record, len(record), _path(path), shape))
    return shape[0], shape[1], shape[2]


class Shards:
    """Buffers that hold records, each followed by OVERRUN bytes; kept alive as long as this object."""

    def __init__(self, buffers: Sequence[Any]):
        self._arrays = [np.frombuffer(buffer, np.uint8) for buffer in buffers]
        self.table = np.array([(array.ctypes.data, array.size) for array in self._arrays], np.uint64).reshape(-1, 2)

    def __len__(self) -> int:
        return len(self._arrays)


class Decoder:
    """Crops of records; for one thread at a time, since it keeps the memory it works in."""

    def __init__(self, shards: Shards, path: str = ""):
        self._shards, self._path = shards, _path(path)
        self._workspace = ctypes.c_void_p(_native.workspace())
        weakref.finalize(self, _native.workspace_free, self._workspace)

    def crop(self, places: np.ndarray, boxes: np.ndarray, out: np.ndarray, luma_only: bool = False) -> np.ndarray:
        """Fill `out`, uint8 (n, 3, height, width); the status of every image, 0 where all went well.

        places: int64 (n, 3) of shard, offset, length; boxes: int32 (n, 5) of x, y, width, height, mirrored.
        """
        num, channels, height, width = out.shape
        if (places.shape, boxes.shape, channels) != ((num, 3), (num, 5), 3):
            raise ValueError(f"{num} images need {num} places and boxes, and three planes each")
        for array, kind in ((places, np.int64), (boxes, np.int32), (out, np.uint8)):
            if array.dtype != kind or not array.flags.c_contiguous:
                raise ValueError(f"an array is not contiguous {kind.__name__}")
        statuses = np.empty(num, np.int32)
        table = self._shards.table
        _native.crop(
            *(self._workspace, self._path, table.ctypes.data, len(table), places.ctypes.data, boxes.ctypes.data),
            *(num, width, height, luma_only, out.ctypes.data, statuses.ctypes.data),
        )
        return statuses


_LIMITS = np.dtype([("area", "f8", 2), ("ratio", "f8", 2), ("mirror", "i8"), ("mirror_begin", "u8")])


class RandomBoxes:
    """Parts of images as torchvision's RandomResizedCrop draws them.

    begins: uint64 (attempts, 4), where the random numbers for area, ratio, x and y begin; mirror: 0 never, 1 by chance,
    2 whenever 1 would not.
    """

    def __init__(
        self, area: tuple[float, float], ratio: tuple[float, float], begins: np.ndarray, mirror: int, mirror_begin: int
    ):
        self._limits = np.array((area, ratio, mirror, mirror_begin), _LIMITS)
        self._begins = np.ascontiguousarray(begins, np.uint64)

    def __call__(self, sizes: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """From width and height (n, 2) and ids to boxes: int32 (n, 5) of x, y, width, height, mirrored."""
        sizes, ids = np.ascontiguousarray(sizes, np.int32), np.ascontiguousarray(ids, np.int64)
        boxes = np.empty((len(ids), 5), np.int32)
        _native.random_boxes(
            *(sizes.ctypes.data, ids.ctypes.data, len(ids), self._limits.ctypes.data, self._begins.ctypes.data),
            *(len(self._begins), boxes.ctypes.data),
        )
        return boxes
