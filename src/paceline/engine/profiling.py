"""`--profile 10ba`: profiles some steps on rank 0 with torch.profiler, after the first steps, which are not typical."""

from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from paceline.config.timeline import Timeline
from paceline.errors import UserError
from paceline.system.files import disk_error, make_folder
from paceline.system.logs import log
from paceline.system.torch_internals import record_memory, write_memory_snapshot
from paceline.track.sinks import Sink

_SKIPPED, _WARM_UP = 4, 1
_TOP = 20
_MAX_NAME = 200  # characters; names of templated kernels are longer


class NoProfiler:
    """Profiles nothing."""

    def step(self, done: int) -> None:
        """Call after every step."""


class Profiler(NoProfiler):
    """Writes RUN/profile/trace.json.gz, a memory snapshot on GPUs, and a record of the operators with the most time."""

    def __init__(self, folder: Path, steps: int, device: torch.device, sink: Sink):
        self._folder, self._steps, self._device, self._sink = folder, steps, device, sink
        self._seen = self._done = 0
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
        plan = schedule(skip_first=_SKIPPED, wait=0, warmup=_WARM_UP, active=steps, repeat=1)
        self._profile = profile(activities=activities, schedule=plan, on_trace_ready=self._write)
        self._profile.start()

    def step(self, done: int) -> None:
        self._seen, self._done = self._seen + 1, done
        if self._seen == _SKIPPED + _WARM_UP and self._device.type == "cuda":
            record_memory(True)
        if self._seen <= _SKIPPED + _WARM_UP + self._steps:
            self._profile.step()
        if self._seen == _SKIPPED + _WARM_UP + self._steps:
            self._profile.stop()

    def _write(self, finished: Any) -> None:
        try:
            make_folder(self._folder)
            finished.export_chrome_trace(str(self._folder / "trace.json.gz"))
            if self._device.type == "cuda":
                write_memory_snapshot(self._folder / "memory.pickle")
                record_memory(False)
        except OSError as error:
            log.warning("the profile was not written: %s", disk_error(error))
        top = top_operators(finished.key_averages(), self._device.type == "cuda")
        record = {"kind": "profile", "step": self._done, "steps": self._steps, "operators": top}
        self._sink.write(record)
        log.info("profiled %d steps: %s (open trace.json.gz at https://ui.perfetto.dev)", self._steps, self._folder)


def top_operators(events: Any, kernels: bool) -> list[dict[str, Any]]:
    """Return name, calls and seconds of the operators, or GPU kernels, with the most time of their own."""
    on_device = [event for event in events if (event.device_type.name != "CPU") == kernels]
    timed = [
        (event, event.self_device_time_total if kernels else event.self_cpu_time_total)
        for event in on_device
        if not event.key.startswith("ProfilerStep")
    ]
    total = sum(time for _, time in timed)
    ranked = sorted(timed, key=lambda pair: pair[1], reverse=True)[:_TOP]
    return [
        {"name": event.key[:_MAX_NAME], "calls": event.count, "seconds": time / 1e6, "fraction": time / total}
        for event, time in ranked
        if time > 0
    ]


def profiled_steps(text: str, timeline: Timeline, first_step: int) -> int:
    """Return the number of steps to profile for a duration such as "10ba", 0 for ""."""
    if not text:
        return 0
    steps, left, before = max(1, timeline.steps(text)), timeline.total - first_step, _SKIPPED + _WARM_UP
    if steps + before > left:
        most = left - before
        fix = f"Use at most {most}ba, or increase --train.duration." if most > 0 else "Increase --train.duration."
        raise UserError(
            "profile-too-long",
            f"--profile {text} needs {steps + before} steps ({before} before the profile), but the run has only {left} "
            f"left. {fix}",
            steps=steps,
            left=left,
        )
    return steps
