"""Background decoding: threads write crops directly into reused batch buffers."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from paceline.config.data import Interpolation
from paceline.data.images import Change, Choose, ImageSplit, Reader
from paceline.errors import UserError
from paceline.system.device import has_streams, host_buffer
from paceline.system.host import unbind
from paceline.system.logs import log

_MIN_CHUNK = 32  # images per native call, which makes the overhead of Python negligible
_MAX_AHEAD_BYTES = 256 << 20
_MAX_FREE = 10  # buffers kept for reuse; image sizes change between phases
T = TypeVar("T")


@dataclass(frozen=True)
class Request:
    """One batch: its samples, how their crops are chosen and resized, and the output size."""

    split: ImageSplit
    keys: np.ndarray
    choose: Choose
    width: int
    height: int
    interpolation: Interpolation
    epoch: int = 0
    change: Change | None = None
    """Applied to the decoded pixels."""
    is_bicubic: Callable[[np.ndarray], np.ndarray] | None = None
    """Tells by key which crops are resized by the bicubic filter, and which by the bilinear one; None: all by
    `interpolation`."""

    @property
    def ids(self) -> np.ndarray:
        return self.keys % len(self.split)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return len(self.keys), 3, self.height, self.width


class Decoded:
    """A request with its pixels. Their memory is reused once this object is deleted and their copy is done."""

    def __init__(self, request: Request, pixels: torch.Tensor, free: "_FreeBuffers"):
        self.request, self.pixels, self._free = request, pixels, free
        self.copied: torch.Event | None = None
        """Set by whoever copies the pixels to a device: recorded right after the copy."""

    def __del__(self) -> None:
        self._free.append((self.pixels, self.copied))
        del self._free[:-_MAX_FREE]


_FreeBuffers = list[tuple[torch.Tensor, torch.Event | None]]
_Work = tuple[Decoded, list[Future[dict[int, str]]]]


class BatchDecoder:
    """Turns requests into uint8 batches (n, 3, height, width), in order, prefetching some of them."""

    def __init__(self, threads: int, device: torch.device, max_corrupt: float, replace: bool = True):
        """`replace`: replace corrupt samples by their neighbors in the batch; otherwise their keys become -1."""
        self._device, self._max_corrupt, self._replace = device, max_corrupt, replace
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="decode", initializer=unbind)
        self._threads = threads
        self._local = threading.local()
        self._free: _FreeBuffers = []
        self._reported: set[str] = set()
        self.replaced = 0

    def uploaded(self, requests: Iterable[Request], start: Callable[[Decoded], Callable[[], T]]) -> Iterator[T]:
        """Yield the result of `start` for every request. `start` begins the copy to the device and returns a function
        for the result, which makes the current stream wait for the copy.

        The next batch is copied while the current one is used, unless it is still being decoded.
        """
        ahead = 1 if has_streams(self._device) else 0
        started: deque[Callable[[], T]] = deque()
        with closing(Decoding(self, requests)) as decoding:
            while True:
                while len(started) <= ahead and (not started or decoding.ready):
                    if (decoded := next(decoding, None)) is None:
                        break
                    started.append(start(decoded))
                    del decoded
                if not started:
                    return
                yield started.popleft()()

    def batches(self, requests: Iterable[Request]) -> Iterator[tuple[Request, torch.Tensor]]:
        """Yield every request with its pixels in host memory, which are valid until the next iteration."""
        with closing(Decoding(self, requests)) as decoding:
            for decoded in decoding:
                yield decoded.request, decoded.pixels

    def _take(self, shape: tuple[int, int, int, int]) -> torch.Tensor:
        """Return a buffer, used before if possible, which saves page faults. Never waits for a copy."""
        for position, (buffer, copied) in enumerate(self._free):
            if tuple(buffer.shape) == shape and (copied is None or copied.query()):
                del self._free[position]
                return buffer
        return host_buffer(shape, self._device)

    def start(self, request: Request) -> _Work:
        """Start to decode a request."""
        decoded = Decoded(request, self._take(request.shape), self._free)
        pixels = decoded.pixels.numpy()
        chunk = max(_MIN_CHUNK, -(-len(request.keys) // self._threads))
        parts = [slice(begin, begin + chunk) for begin in range(0, len(request.keys), chunk)]
        return decoded, [self._pool.submit(self._decode, request, pixels, part) for part in parts]

    def _decode(self, request: Request, pixels: np.ndarray, part: slice) -> dict[int, str]:
        """Decode a part of a batch. Returns the reason for each position that failed."""
        keys = request.keys[part]
        failed = self._read(request, keys, pixels[part])
        if request.change:
            request.change(pixels[part], keys)
        return {part.start + position: reason for position, reason in failed.items()}

    def _read(self, request: Request, keys: np.ndarray, out: np.ndarray) -> dict[int, str]:
        reader = self._reader(request.split)
        if request.is_bicubic is None:
            return reader.read(keys, request.choose, out, request.interpolation)
        is_bicubic = request.is_bicubic(keys)
        chosen: dict[Interpolation, np.ndarray] = {"bilinear": ~is_bicubic, "bicubic": is_bicubic}
        failed: dict[int, str] = {}
        for interpolation, wanted in chosen.items():
            if len(positions := np.flatnonzero(wanted)):
                crops = np.empty((len(positions), *out.shape[1:]), np.uint8)
                reasons = reader.read(keys[positions], request.choose, crops, interpolation)
                failed |= {int(positions[position]): reason for position, reason in reasons.items()}
                out[positions] = crops
        return failed

    def _reader(self, split: ImageSplit) -> Reader:
        """Return this thread's reader of a split."""
        if getattr(self._local, "split", None) is not split:
            self._local.split, self._local.reader = split, split.reader()
        reader: Reader = self._local.reader
        return reader

    def settle(self, work: _Work) -> Decoded:
        """Wait until a batch is decoded, and return it with its corrupt samples replaced."""
        decoded, futures = work
        reasons = {position: reason for future in futures for position, reason in future.result().items()}
        if not reasons:
            return decoded
        request = decoded.request
        split, samples, failed = request.split, len(request.split), list(reasons)
        for position in failed:  # reported here, in the order of batches, not by the threads that prefetch
            where = split.where(int(request.keys[position]))
            if where not in self._reported:
                self._reported.add(where)
                log.warning("corrupt sample: %s: %s", where, reasons[position])
        self.replaced += len(failed)
        if self._replace:
            self._use_neighbors(decoded.pixels, request, failed)
        else:
            request.keys[failed] = -1
        corrupt = len(self._reported)
        if corrupt > self._max_corrupt * max(samples, 1 / (self._max_corrupt or 1)):
            raise UserError(
                "too-many-corrupt-samples",
                f"{split.folder}: {corrupt} of {samples} samples are corrupt, more than "
                f"data.max_corrupt={self._max_corrupt} allows. {split.fix} Or increase data.max_corrupt.",
                path=split.folder,
                corrupt=corrupt,
                samples=samples,
            )
        return decoded

    def _use_neighbors(self, buffer: torch.Tensor, request: Request, failed: list[int]) -> None:
        pixels = buffer.view(len(request.keys), -1)
        valid = sorted(set(range(len(request.keys))) - set(failed))
        if not valid:
            message = f"{request.split.folder}: all {len(failed)} samples of a batch are corrupt. {request.split.fix}"
            raise UserError("batch-corrupt", message, path=request.split.folder)
        for position in failed:
            nearest = min(valid, key=lambda other: abs(other - position))
            pixels[position] = pixels[nearest]
            request.keys[position] = request.keys[nearest]  # the label follows the pixels


class Decoding:
    """The batches of some requests, in order, with several of them being decoded."""

    def __init__(self, decoder: BatchDecoder, requests: Iterable[Request]):
        self._decoder, self._requests = decoder, iter(requests)
        self._waiting: deque[_Work] = deque()

    def __iter__(self) -> Iterator[Decoded]:
        return self

    def __next__(self) -> Decoded:
        self._fill()
        if not self._waiting:
            raise StopIteration
        return self._decoder.settle(self._waiting.popleft())

    @property
    def ready(self) -> bool:
        """Whether the next batch is there without waiting."""
        self._fill()
        return bool(self._waiting) and all(future.done() for future in self._waiting[0][1])

    def _fill(self) -> None:
        while self._has_room() and (request := next(self._requests, None)):
            self._waiting.append(self._decoder.start(request))

    def _has_room(self) -> bool:
        """Prefetch at least two batches, more if they are small."""
        waiting = self._waiting
        size = sum(decoded.pixels.numel() for decoded, _ in waiting)
        return len(waiting) < 2 or (len(waiting) < 8 and size < _MAX_AHEAD_BYTES)

    def close(self) -> None:
        """Stop decoding. Buffers are free once no thread writes to them."""
        while self._waiting:
            for future in self._waiting[0][1]:
                if not future.cancel():
                    future.exception()
            self._waiting.popleft()
