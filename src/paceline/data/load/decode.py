"""Batches of crops in the background: threads decode straight into batch buffers that are allocated once."""

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

_LEAST_CHUNK = 32  # images a native call, for Python's share of the time to vanish
_MAX_AHEAD_BYTES = 256 << 20


@dataclass(frozen=True)
class Request:
    """One batch: which samples, how the part of each that is seen is chosen, and the size it is brought to."""

    split: ImageSplit
    keys: np.ndarray
    choose: Choose
    width: int
    height: int
    epoch: int = 0
    change: Change | None = None
    """What else happens to the pixels."""

    @property
    def ids(self) -> np.ndarray:
        return self.keys % len(self.split)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return len(self.keys), 3, self.height, self.width


_Work = tuple[torch.Tensor, Request, list[Future[dict[int, str]]]]


class BatchDecoder:
    """Turns requests into uint8 batches (n, 3, height, width), in order, some of them ahead of time."""

    def __init__(self, threads: int, pin: bool, max_corrupt: float, replace: bool = True):
        """`replace`: corrupt samples by their neighbors; else their keys become -1."""
        self._pin, self._max_corrupt, self._replace = pin, max_corrupt, replace
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="decode", initializer=unbind)
        self._threads = threads
        self._own = threading.local()
        self._free: list[tuple[torch.Tensor, torch.cuda.Event | None]] = []
        self._named: set[str] = set()
        self.replaced = 0

    def batches(self, requests: Iterable[Request]) -> Iterator[tuple[Request, torch.Tensor]]:
        """Every request with its pixels, which are valid until the next one is asked for."""
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
                    self._give_back(previous)
                buffer, request, futures = waiting.popleft()
                previous = buffer
                self._settle(buffer, request, futures)
                yield request, buffer
        finally:
            for buffer, _, futures in waiting:  # left early: buffers come back once nobody writes to them
                for future in futures:
                    if not future.cancel():
                        future.exception()
                self._give_back(buffer)
            if previous is not None:
                self._give_back(previous)

    @staticmethod
    def _has_room(waiting: deque[_Work]) -> bool:
        """Two batches ahead always, more while they are small."""
        return len(waiting) < 2 or (len(waiting) < 8 and sum(work[0].numel() for work in waiting) < _MAX_AHEAD_BYTES)

    def _take(self, shape: tuple[int, int, int, int]) -> torch.Tensor:
        for position, (buffer, event) in enumerate(self._free):
            if tuple(buffer.shape) == shape:
                del self._free[position]
                if event:
                    event.synchronize()  # its last transfer to the device is over
                return buffer
        return torch.empty(shape, dtype=torch.uint8, pin_memory=self._pin)

    def _give_back(self, buffer: torch.Tensor) -> None:
        """Keep a buffer for reuse: the kernel has to clear fresh ones. Few, since sizes change on the way."""
        event = torch.cuda.Event() if self._pin else None
        if event:
            event.record()
        self._free.append((buffer, event))
        del self._free[:-10]

    def _start(self, request: Request) -> _Work:
        buffer = self._take(request.shape)
        pixels = buffer.numpy()
        chunk = max(_LEAST_CHUNK, -(-len(request.keys) // self._threads))
        parts = [slice(begin, begin + chunk) for begin in range(0, len(request.keys), chunk)]
        return buffer, request, [self._pool.submit(self._decode, request, pixels, part) for part in parts]

    def _decode(self, request: Request, pixels: np.ndarray, part: slice) -> dict[int, str]:
        """Decode some images of a batch; positions of those that failed, with the reasons."""
        split, keys = request.split, request.keys[part]
        failed = self._reader(split).read(keys, request.choose, pixels[part])
        if request.change:
            request.change(pixels[part], keys)
        return {part.start + position: reason for position, reason in failed.items()}

    def _reader(self, split: ImageSplit) -> Reader:
        """This thread's own, opened at the first use of these split."""
        if getattr(self._own, "split", None) is not split:
            self._own.split, self._own.reader = split, split.reader()
        reader: Reader = self._own.reader
        return reader

    def _settle(self, buffer: torch.Tensor, request: Request, futures: list[Future[dict[int, str]]]) -> None:
        reasons = {position: reason for future in futures for position, reason in future.result().items()}
        if not reasons:
            return
        split, samples, failed = request.split, len(request.split), list(reasons)
        for position in failed:  # here, in the order of batches, not in the threads that are ahead
            where = split.where(int(request.keys[position]))
            if where not in self._named:
                self._named.add(where)
                log.warning("corrupt sample: %s: %s", where, reasons[position])
        self.replaced += len(failed)
        if self._replace:
            self._use_neighbors(buffer, request, failed)
        else:
            request.keys[failed] = -1
        if len(self._named) > self._max_corrupt * max(samples, 1 / (self._max_corrupt or 1)):
            raise UserError(
                f"{split.folder}: {len(self._named)} of {samples} samples have been found corrupt, more "
                f"than data.max_corrupt={self._max_corrupt}; {split.cure}, or allow more of them"
            )

    def _use_neighbors(self, buffer: torch.Tensor, request: Request, failed: list[int]) -> None:
        pixels = buffer.view(len(request.keys), -1)
        sound = sorted(set(range(len(request.keys))) - set(failed))
        if not sound:
            raise UserError(f"{request.split.folder}: a whole batch is corrupt; {request.split.cure}")
        for position in failed:
            nearest = min(sound, key=lambda other: abs(other - position))
            pixels[position] = pixels[nearest]
            request.keys[position] = request.keys[nearest]  # the label follows the pixels
