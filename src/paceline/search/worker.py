"""Work on a study: run trials side by side until none is left, the budget is used up, or the user stops."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from paceline.search.spec import SweepSpec
from paceline.search.study import Claim, SharedStudy
from paceline.search.trial import TrialEnd, TrialRun
from paceline.system.gpus import gpus_side_by_side, visible_gpus
from paceline.system.host import cores
from paceline.system.signals import handling_signals

_POLL_SECONDS = 1.0  # between looks for trials of workers that were killed
OnTrial = Callable[[int, dict[str, str], TrialEnd | None], None]
"""Called with the number and values of a trial when it starts (None) and when it ends."""


def devices_of(spec: SweepSpec) -> list[dict[str, str]]:
    """Return the environment of each of the trials that run side by side: its own GPUs, or its part of the cores."""
    if spec.parallel == 1:
        return [{}]
    gpus = visible_gpus() if spec.recipe.device in ("auto", "cuda") else []
    if gpus:
        return gpus_side_by_side(gpus, spec.procs, spec.parallel)
    if "PACELINE_THREADS" in os.environ:
        return [{}] * spec.parallel
    threads = max(1, cores() // (spec.parallel * spec.procs))
    return [{"PACELINE_THREADS": str(threads)}] * spec.parallel


class Worker:
    """Runs trials of a sweep in threads, one per trial that runs side by side."""

    def __init__(self, spec: SweepSpec, on_trial: OnTrial) -> None:
        self.spec = spec
        self.study = SharedStudy(spec)
        self.signal = 0
        """The signal that stopped the worker."""
        self._on_trial = on_trial
        self._stopping = threading.Event()
        self._deadline = time.monotonic() + spec.budget if spec.budget else None
        self._running: dict[int, TrialRun] = {}
        self._errors: list[BaseException] = []

    @property
    def is_out_of_time(self) -> bool:
        return self._deadline is not None and time.monotonic() >= self._deadline

    def run(self) -> None:
        """Work until no trial is left. Raises the first error that every trial would have on this machine."""
        threads = [
            threading.Thread(target=self._work, args=(environment,), name=f"trial {slot}")
            for slot, environment in enumerate(devices_of(self.spec))
        ]
        with self._signals():
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.5)
        if self._errors:
            raise self._errors[0]

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Pass signals on to the trainings, which then checkpoint and stop."""
        is_main = threading.current_thread() is threading.main_thread()
        with handling_signals(self._handle) if is_main else nullcontext():
            yield

    def _handle(self, signum: int) -> None:
        self.signal = self.signal or signum
        self._stopping.set()
        for run in list(self._running.values()):
            run.send(signum)

    def _work(self, environment: dict[str, str]) -> None:
        try:
            while not self._stopping.is_set() and not self.is_out_of_time:
                if claim := self.study.next():
                    self._train(claim, environment)
                    self.study.check_failures()
                elif self.study.is_done():
                    return
                else:
                    self._stopping.wait(_POLL_SECONDS)
        except BaseException as error:
            self._errors.append(error)
            self._stopping.set()  # the other trials end, and no other starts

    def _train(self, claim: Claim, environment: dict[str, str]) -> None:
        number, words = claim.number, self.spec.words_of(claim.trial.params)
        run = TrialRun(
            self.spec, number, words, environment, lambda *found: self.study.report(claim, *found), dict(claim.reported)
        )
        self._running[number] = run
        try:
            self._on_trial(number, words, None)
            end = run.train(lambda: bool(self.signal))
            if end.state:
                self.study.finish(claim, end)
                self._on_trial(number, words, end)
        finally:
            del self._running[number]
            claim.lock.release()
