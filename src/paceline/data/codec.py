"""ctypes bindings of the native codec, which packs JPEGs into records and decodes crops of records in batches.

It is our own because image libraries decode a JPEG from its start, which is most of the cost; records allow access to
the blocks of a crop. native/codec.h lists what each C file does.
"""

import ctypes
import os
import weakref
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np

from paceline.config.data import Interpolation
from paceline.errors import UserError

_POINTER, _SIZE, _INT, _LONG = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int64
_PATHS = ("portable", "avx2")  # numbered as in api.c; the last supported one is the fastest
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
    "thumbnails": (_INT, [_INT, _POINTER, _LONG, _POINTER, _LONG, _POINTER, _POINTER]),
    "crop": (
        _INT,
        [_POINTER, _INT, _POINTER, _LONG, _POINTER, _POINTER, _LONG, _INT, _INT, _INT, _INT, _POINTER, _POINTER],
    ),
}


class CodecError(ValueError):
    """The codec cannot read this input; the message gives the reason."""


class _Native:
    """The functions of the shared library that is built with the package."""

    def __init__(self) -> None:
        spec = find_spec("paceline.data._native")
        if spec is None or not spec.origin:
            raise UserError(
                "codec-not-built", "paceline's native codec is not built. Reinstall the package with a C compiler."
            )
        library = ctypes.CDLL(spec.origin)
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(library, f"paceline_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)

    def __getattr__(self, name: str) -> Any:  # for type checkers: __init__ sets the functions
        raise AttributeError(name)


_native = _Native()
OVERRUN: int = _native.overrun()
"""Bytes after a record that must be readable."""


def paths() -> list[str]:
    """Return the code paths this CPU supports, the fastest one last. All of them return identical bytes."""
    return [name for number, name in enumerate(_PATHS) if _native.has_path(number)]


def _path(name: str = "") -> int:
    """Return the number of a code path: `name`, else PACELINE_CODEC_PATH, else the fastest one."""
    name = name or os.environ.get("PACELINE_CODEC_PATH", "") or paths()[-1]
    if name not in paths():
        supported = ", ".join(paths())
        message = f"codec path {name!r} is not available. This CPU supports {supported}."
        raise UserError("unknown-codec-path", message, path=name)
    return _PATHS.index(name)


def _check(status: int) -> None:
    if status:
        raise CodecError(reason(status))


def reason(status: int) -> str:
    """Return the message of a status."""
    text: bytes = _native.text(status)
    return text.decode()


def _copy_and_free(pointer: ctypes.c_void_p, length: ctypes.c_size_t) -> bytes:
    """Copy a buffer that the native code allocated."""
    try:
        return ctypes.string_at(pointer, length.value)
    finally:
        _native.free(pointer)


def pack(jpeg: bytes) -> bytes:
    """Return the record of a baseline JPEG. Raises CodecError for anything else."""
    record, length = ctypes.c_void_p(), ctypes.c_size_t()
    _check(_native.pack(jpeg, len(jpeg), ctypes.byref(record), ctypes.byref(length)))
    return _copy_and_free(record, length)


def unpack(record: bytes) -> bytes:
    """Return a baseline JPEG with the same coefficients as the record."""
    jpeg, length = ctypes.c_void_p(), ctypes.c_size_t()
    padded = record + bytes(OVERRUN)
    _check(_native.unpack(padded, len(record), ctypes.byref(jpeg), ctypes.byref(length)))
    return _copy_and_free(jpeg, length)


def describe(record: bytes, path: str = "") -> tuple[int, int, int]:
    """Verify a record. Returns its width, height and number of components."""
    shape = (ctypes.c_int32 * 3)()
    _check(_native.describe(record, len(record), _path(path), shape))
    return shape[0], shape[1], shape[2]


class Shards:
    """Buffers of records, each followed by OVERRUN bytes. This object keeps them alive."""

    def __init__(self, buffers: Sequence[Any]):
        self._arrays = [np.frombuffer(buffer, np.uint8) for buffer in buffers]
        self.table = np.array([(array.ctypes.data, array.size) for array in self._arrays], np.uint64).reshape(-1, 2)

    def __len__(self) -> int:
        return len(self._arrays)


class Decoder:
    """Decodes crops of records. Not thread-safe: it reuses its working memory."""

    def __init__(self, shards: Shards, path: str = ""):
        self._shards, self._path = shards, _path(path)
        self._workspace = ctypes.c_void_p(_native.workspace())
        weakref.finalize(self, _native.workspace_free, self._workspace)

    def crop(
        self,
        places: np.ndarray,
        boxes: np.ndarray,
        out: np.ndarray,
        luma_only: bool = False,
        interpolation: Interpolation = "bilinear",
    ) -> np.ndarray:
        """Fill `out`, uint8 (n, 3, height, width). Returns the status of every image; 0 means success.

        places: int64 (n, 3) of shard, offset, length. boxes: int32 (n, 5) of x, y, width, height, mirrored.
        """
        num, channels, height, width = out.shape
        if (places.shape, boxes.shape, channels) != ((num, 3), (num, 5), 3):
            raise ValueError(f"{num} images need {num} places, {num} boxes and three planes each")
        for array, dtype in ((places, np.int64), (boxes, np.int32), (out, np.uint8)):
            if array.dtype != dtype or not array.flags.c_contiguous:
                raise ValueError(f"an array is not contiguous {dtype.__name__}")
        statuses = np.empty(num, np.int32)
        table = self._shards.table
        _native.crop(
            *(self._workspace, self._path, table.ctypes.data, len(table), places.ctypes.data, boxes.ctypes.data),
            *(num, width, height, luma_only, interpolation == "bicubic", out.ctypes.data, statuses.ctypes.data),
        )
        return statuses


THUMBNAIL = 32
"""Side of thumbnails; THUMBNAIL of native/codec.h."""


def thumbnails(shards: Shards, places: np.ndarray, path: str = "") -> tuple[np.ndarray, np.ndarray]:
    """Return the mean luma of 32 x 32 equal parts of images, float32 (n, 32, 32), and the status of every image.

    Computed from the DC coefficients, so the parts of small images are parts of the same blocks.
    """
    places = np.ascontiguousarray(places, np.int64)
    out, statuses = np.zeros((len(places), THUMBNAIL, THUMBNAIL), np.float32), np.empty(len(places), np.int32)
    _native.thumbnails(
        *(_path(path), shards.table.ctypes.data, len(shards.table), places.ctypes.data, len(places)),
        *(out.ctypes.data, statuses.ctypes.data),
    )
    return out, statuses


_LIMITS = np.dtype([("area", "f8", 2), ("ratio", "f8", 2), ("mirror", "i8"), ("mirror_begin", "u8")])


class RandomBoxes:
    """Random crops with the distribution of torchvision's RandomResizedCrop.

    begins: uint64 (attempts, 4), the starts of the random streams for area, ratio, x and y.
    mirror: 0 never, 1 at random, 2 exactly when 1 would not.
    """

    def __init__(
        self, area: tuple[float, float], ratio: tuple[float, float], begins: np.ndarray, mirror: int, mirror_begin: int
    ):
        self._limits = np.array((area, ratio, mirror, mirror_begin), _LIMITS)
        self._begins = np.ascontiguousarray(begins, np.uint64)

    def __call__(self, sizes: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """Return boxes for sizes (n, 2) of width, height and ids: int32 (n, 5) of x, y, width, height, mirrored."""
        sizes, ids = np.ascontiguousarray(sizes, np.int32), np.ascontiguousarray(ids, np.int64)
        boxes = np.empty((len(ids), 5), np.int32)
        _native.random_boxes(
            *(sizes.ctypes.data, ids.ctypes.data, len(ids), self._limits.ctypes.data, self._begins.ctypes.data),
            *(len(self._begins), boxes.ctypes.data),
        )
        return boxes
