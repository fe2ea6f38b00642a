"""Batches of crops in the background: threads decode straight into batch buffers that are allocated once."""

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from paceline.base.logs import log
from paceline.data.photographs import Choose, Photographs, Reader
from paceline.errors import UserError

_LEAST_CHUNK = 32  # images a native call, for Python's share of the time to vanish
_MAX_AHEAD_BYTES = 256 << 20


@dataclass(frozen=True)
class Request:
    """One batch: which samples, how the part of each that is seen is chosen, and the size it is brought to."""

    ids: np.ndarray
    choose: Choose
    width: int
    height: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return len(self.ids), 3, self.height, self.width


_Work = tuple[torch.Tensor, Request, list[Future[list[int]]]]


class BatchDecoder:
    """Turns requests into uint8 batches (n, 3, height, width), in order, some of them ahead of time."""

    def __init__(self, photographs: Photographs, threads: int, pin: bool, max_damaged: float, replace: bool = True):
        """`replace`: damaged samples by their neighbours; else their ids become -1."""
        self._photographs, self._pin, self._max_damaged, self._replace = photographs, pin, max_damaged, replace
        self._pool, self._threads = ThreadPoolExecutor(threads, thread_name_prefix="decode"), threads
        self._own = threading.local()
        self._free: list[tuple[torch.Tensor, torch.cuda.Event | None]] = []
        self._named: set[int] = set()
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
        chunk = max(_LEAST_CHUNK, -(-len(request.ids) // self._threads))
        parts = [slice(begin, begin + chunk) for begin in range(0, len(request.ids), chunk)]
        return buffer, request, [self._pool.submit(self._decode, request, pixels, part) for part in parts]

    def _decode(self, request: Request, pixels: np.ndarray, part: slice) -> list[int]:
        """Decode some images of a batch; positions of those that failed."""
        reader: Reader | None = getattr(self._own, "reader", None)
        if reader is None:
            reader = self._own.reader = self._photographs.reader()
        failed = reader.read(request.ids[part], request.choose, pixels[part])
        for position, reason in failed.items():
            number = int(request.ids[part][position])
            if number not in self._named:
                self._named.add(number)
                log.warning("damaged sample: %s: %s", self._photographs.where(number), reason)
        return [part.start + position for position in failed]

    def _settle(self, buffer: torch.Tensor, request: Request, futures: list[Future[list[int]]]) -> None:
        failed = [position for future in futures for position in future.result()]
        if not failed:
            return
        self.replaced += len(failed)
        if self._replace:
            self._use_neighbours(buffer, request, failed)
        else:
            request.ids[failed] = -1
        samples = len(self._photographs)
        if len(self._named) > self._max_damaged * max(samples, 1 / (self._max_damaged or 1)):
            raise UserError(
                f"{self._photographs.folder}: {len(self._named)} of {samples} samples have been found damaged, more "
                f"than data.max_damaged={self._max_damaged}; {self._photographs.cure}, or allow more of them"
            )

    def _use_neighbours(self, buffer: torch.Tensor, request: Request, failed: list[int]) -> None:
        pixels = buffer.view(len(request.ids), -1)
        sound = sorted(set(range(len(request.ids))) - set(failed))
        if not sound:
            raise UserError(f"{self._photographs.folder}: a whole batch is damaged; {self._photographs.cure}")
        for position in failed:
            nearest = min(sound, key=lambda other: abs(other - position))
            pixels[position] = pixels[nearest]
            request.ids[position] = request.ids[nearest]  # the label follows the pixels
