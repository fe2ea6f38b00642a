"""Background decoding: threads write crops directly into reused batch buffers."""

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from paceline.data.images import Change, Choose, ImageSplit, Reader
from paceline.errors import UserError
from paceline.system.host import unbind
from paceline.system.logs import log

_MIN_CHUNK = 32  # images per native call, which makes the overhead of Python negligible
_MAX_AHEAD_BYTES = 256 << 20


@dataclass(frozen=True)
class Request:
    """One batch: its samples, how their crops are chosen, and the output size."""

    split: ImageSplit
    keys: np.ndarray
    choose: Choose
    width: int
    height: int
    epoch: int = 0
    change: Change | None = None
    """Applied to the decoded pixels."""

    @property
    def ids(self) -> np.ndarray:
        return self.keys % len(self.split)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return len(self.keys), 3, self.height, self.width


_Work = tuple[torch.Tensor, Request, list[Future[dict[int, str]]]]


class BatchDecoder:
    """Turns requests into uint8 batches (n, 3, height, width), in order, prefetching some of them."""

    def __init__(self, threads: int, pin: bool, max_corrupt: float, replace: bool = True):
        """`replace`: replace corrupt samples by their neighbors in the batch; otherwise their keys become -1."""
        self._pin, self._max_corrupt, self._replace = pin, max_corrupt, replace
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="decode", initializer=unbind)
        self._threads = threads
        self._local = threading.local()
        self._free: list[tuple[torch.Tensor, torch.cuda.Event | None]] = []
        self._reported: set[str] = set()
        self.replaced = 0

    def batches(self, requests: Iterable[Request]) -> Iterator[tuple[Request, torch.Tensor]]:
        """Yield every request with its pixels, which are valid until the next iteration."""
        waiting: deque[_Work] = deque()
        pending = iter(requests)
        previous: torch.Tensor | None = None
        try:
            while True:
                while request := next(pending, None) if self._has_room(waiting) else None:
                    waiting.append(self._start(request))
                if not waiting:
                    return
                if previous is not None:
                    self._release(previous)
                buffer, request, futures = waiting.popleft()
                previous = buffer
                self._settle(buffer, request, futures)
                yield request, buffer
        finally:
            for buffer, _, futures in waiting:  # closed early: buffers are free once no thread writes to them
                for future in futures:
                    if not future.cancel():
                        future.exception()
                self._release(buffer)
            if previous is not None:
                self._release(previous)

    @staticmethod
    def _has_room(waiting: deque[_Work]) -> bool:
        """Prefetch at least two batches, more if they are small."""
        return len(waiting) < 2 or (len(waiting) < 8 and sum(work[0].numel() for work in waiting) < _MAX_AHEAD_BYTES)

    def _take(self, shape: tuple[int, int, int, int]) -> torch.Tensor:
        for position, (buffer, event) in enumerate(self._free):
            if tuple(buffer.shape) == shape:
                del self._free[position]
                if event:
                    event.synchronize()  # wait for its last transfer to the device
                return buffer
        return torch.empty(shape, dtype=torch.uint8, pin_memory=self._pin)

    def _release(self, buffer: torch.Tensor) -> None:
        """Keep a buffer for reuse, which saves page faults. Only a few: image sizes change between phases."""
        event = torch.cuda.Event() if self._pin else None
        if event:
            event.record()
        self._free.append((buffer, event))
        del self._free[:-10]

    def _start(self, request: Request) -> _Work:
        buffer = self._take(request.shape)
        pixels = buffer.numpy()
        chunk = max(_MIN_CHUNK, -(-len(request.keys) // self._threads))
        parts = [slice(begin, begin + chunk) for begin in range(0, len(request.keys), chunk)]
        return buffer, request, [self._pool.submit(self._decode, request, pixels, part) for part in parts]

    def _decode(self, request: Request, pixels: np.ndarray, part: slice) -> dict[int, str]:
        """Decode a part of a batch. Returns the reason for each position that failed."""
        split, keys = request.split, request.keys[part]
        failed = self._reader(split).read(keys, request.choose, pixels[part])
        if request.change:
            request.change(pixels[part], keys)
        return {part.start + position: reason for position, reason in failed.items()}

    def _reader(self, split: ImageSplit) -> Reader:
        """Return this thread's reader of a split."""
        if getattr(self._local, "split", None) is not split:
            self._local.split, self._local.reader = split, split.reader()
        reader: Reader = self._local.reader
        return reader

    def _settle(self, buffer: torch.Tensor, request: Request, futures: list[Future[dict[int, str]]]) -> None:
        reasons = {position: reason for future in futures for position, reason in future.result().items()}
        if not reasons:
            return
        split, samples, failed = request.split, len(request.split), list(reasons)
        for position in failed:  # reported here, in the order of batches, not by the threads that prefetch
            where = split.where(int(request.keys[position]))
            if where not in self._reported:
                self._reported.add(where)
                log.warning("corrupt sample: %s: %s", where, reasons[position])
        self.replaced += len(failed)
        if self._replace:
            self._use_neighbors(buffer, request, failed)
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
