"""A run's books: opens or resumes its folder, and writes down what the loop does.

Ranks other than the leader go through the same motions with null objects, so that the loop has no special cases.
"""

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from paceline.base import logs
from paceline.base.device import peak_memory
from paceline.base.files import disk_error
from paceline.base.host import host_name
from paceline.base.logs import log
from paceline.checkpoint import store
from paceline.checkpoint.writer import NoWriter, Writer
from paceline.distributed.world import World
from paceline.engine.build import Setup
from paceline.engine.doubts import doubts
from paceline.engine.mirror import Mirror, newest_step
from paceline.engine.totals import totals
from paceline.engine.window import SPLIT, Window
from paceline.errors import UserError
from paceline.track.progress import Display
from paceline.track.records import RunFolder
from paceline.track.sealed import write_sealed
from paceline.track.sinks import DiskWarning, Sink


@dataclass
class Run:
    folder: RunFolder
    setup: Setup
    sink: Sink
    writer: Writer | NoWriter
    display: Display
    mirror: Mirror
    first_step: int = 0
    best: float | None = None
    disk: DiskWarning = field(default_factory=DiskWarning)
    window: Window = field(default_factory=Window)
    off_track: str = ""
    """Why the run should end after its next save."""
    _evaluation: dict[str, Any] = field(default_factory=dict)
    _doubted: set[str] = field(default_factory=set)
    _scale: float = 0.0
    _status: str = "running"

    @property
    def _world(self) -> World:
        return self.setup.world

    def _place(self, step: int) -> dict[str, Any]:
        """What a record of a step says first; `phase` is that of the step just done."""
        timeline = self.setup.timeline
        return {"step": step, "epoch": timeline.epoch_at(step), "phase": timeline.stage_at(max(0, step - 1)).number}

    def log(self, step: int, lr: float) -> None:
        """Close the window: every rank learns every rank's figures, the leader writes them down."""
        newest = newest_step(self.folder.checkpoints) if self.mirror.needed and self._world.is_leader else -1
        more = [self.setup.loader.damaged, peak_memory(self._world.device), newest]
        own = torch.cat([self.window.take(), torch.tensor(more, dtype=torch.float64)])
        ranks = torch.stack(self._world.gather(own))
        split = {name: times for name, times in zip(SPLIT, ranks[:, 5:-3].T.tolist(), strict=True) if _known(times)}
        steps = int(ranks[0, 0])
        if (ranks[:, 3] >= 0).any():
            first = step - steps + 1 + int(ranks[ranks[:, 3] >= 0, 3].min())
            self._not_finite(f"the loss is not finite at step {first} (learning rate {lr:.4g} now)", first - 1)
        images = int(ranks[0, 4])
        seconds = {name: sum(times) / len(times) for name, times in split.items()}
        record = {
            "kind": "train",
            **self._place(step),
            "steps": steps,
            "lr": lr,
            "loss": (ranks[:, 1].mean() / steps).item(),
            "top1": ranks[:, 2].sum().item() / images,
            "images": images,
            "images_per_second": images / sum(seconds.values()),
            "seconds": seconds,
        }
        if self.setup.scaler.is_enabled():
            record["loss_scale"] = scale = self.setup.scaler.get_scale()
            if scale < self._scale and self._world.is_leader:
                log.info("fp16 overflowed before step %d: those steps were skipped, loss scale now %g", step, scale)
            self._scale = scale
        if damaged := int(ranks[:, -3].sum()):
            record["damaged"] = damaged
        if self._world.size > 1:
            record["seconds_per_rank"] = split
        record["memory_per_rank"] = ranks[:, -2].long().tolist()
        self.sink.write(record)
        self.display.train(record)
        self.mirror.follow(int(ranks[0, -1]), self.writer.wait)

    def _not_finite(self, what: str, weights_of: int) -> None:
        """End the run; the weights after step `weights_of` are no good, so neither is a save of that step."""
        self.writer.wait()
        good = self._world.on_leader(lambda: str(store.put_aside_from(self.folder.checkpoints, weights_of) or ""))
        where = f"the last good checkpoint is {good}" if good else "no checkpoint was saved before it"
        message = (
            f"{what}; {where}; try a lower --optim.lr, a longer --optim.schedule.warmup, --optim.clip_norm 1, "
            "or another --precision"
        )
        self._summarise("failed", weights_of, message=message)
        self.close()
        raise UserError(message)

    def evaluate(self, step: int, measure: Callable[..., dict[str, float]]) -> bool:
        """Show an evaluation while it goes on, and write it down; whether it is the best so far."""
        begin = time.perf_counter()
        with self.display.evaluating(self.setup.evaluator(step)) as advance:
            metrics = measure(on_batch=advance)
        seconds = time.perf_counter() - begin
        record = {"kind": "eval", **self._place(step), **metrics, "seconds": seconds}
        self.sink.write(record)
        self.display.evaluated(record)
        if not math.isfinite(metrics["loss"]):
            self._not_finite(f"the validation loss is not finite after step {step}", step)
        self._evaluation = record
        self._compare_with_curve(record)
        self._question(record)
        self.window.restart()
        metric = self.setup.recipe.checkpoint.best
        value = -metrics[metric] if metric == "loss" else metrics[metric]
        improved = self.best is None or value > self.best
        self.best = value if improved else self.best
        return improved

    def _compare_with_curve(self, record: dict[str, Any]) -> None:
        """Say when the run falls clearly below what its recipe expects by now; end it if the recipe says so."""
        curve = self.setup.recipe.curve
        expected, found = curve.expected(record["epoch"]), record[curve.metric]
        if expected is None or found >= expected - curve.tolerance:
            return
        what = (
            f"{curve.metric} is {found:.2%} after epoch {record['epoch']:.2f}, where {self.setup.recipe.name} should "
            f"have reached {expected:.2%}"
        )
        if curve.stop:
            self.off_track = what
        elif self._world.is_leader:
            log.warning("%s", what)

    def _question(self, record: dict[str, Any]) -> None:
        """Say when an evaluation looks like a failed training: once for each reason, and once more at the end."""
        progress = record["step"] / self.setup.total_steps
        for reason, text in doubts(record, len(self.setup.source.classes), progress).items():
            if self._world.is_leader and (reason not in self._doubted or progress == 1):
                log.warning("epoch %.2f: %s", record["epoch"], text)
            self._doubted.add(reason)

    def give_up(self, step: int) -> None:
        """End a run that fell below its curve; it has been saved, and can go on with curve.stop off."""
        self._settle(step)
        self._summarise("failed", step, message=self.off_track)
        self.close()
        raise UserError(
            f"{self.off_track}; stopped, as curve.stop says; to go on all the same: "
            f"paceline train --resume {self.folder.path} --curve.stop false"
        )

    def save(self, step: int, setup: Setup) -> None:
        """Start a save; only the copy into host memory holds training up."""
        begin = time.perf_counter()
        measured = self._evaluation if self._evaluation.get("step") == step else {}
        metrics: dict[str, float] = {name: measured[name] for name in ("top1", "top5", "loss") if name in measured}
        state = setup.state(step) if setup.replica.gathers else None  # all ranks take part
        parts = self.writer.snapshot(lambda: state or setup.state(step))
        self.sink.write({"kind": "save", **self._place(step), "seconds": time.perf_counter() - begin})
        self.writer.start(step, parts, metrics, partial(self._bring_records_to_disk, step))
        self.window.restart()

    def _bring_records_to_disk(self, step: int) -> None:
        """In the background, before the checkpoint of this step is committed."""
        self.sink.flush()
        self._summarise("running", step)
        self.folder.sync()
        self.disk.take_back()

    def begin(self) -> None:
        self._scale = self.setup.scaler.get_scale()
        self._summarise("running", self.first_step)

    def stopped(self, step: int) -> None:
        self._settle(step)
        self._summarise("interrupted", step)
        self.close()
        self.mirror.complete()
        how = f"go on with: paceline train --resume {self.folder.path}"
        if self._world.local_size > 1:
            how += f" --procs {self._world.local_size}"
        if self._world.local_size < self._world.size:
            how = "to go on, start the same command again on every machine"
        if job := os.environ.get("PACELINE_JOB"):
            how = f"go on with: paceline resume {job}"
        log.info("stopped after step %d; %s", step, how)

    def failed(self, message: str) -> None:
        """Write down why the run ends here, unless that has been done."""
        self.writer.wait()
        if self._world.is_leader and self._status == "running":
            self._summarise("failed", self.folder.read_summary().get("step", self.first_step), message=message)
            logs.to_file_only(message)
            self.close()

    def finish(self) -> dict[str, Any]:
        step = self.setup.total_steps
        self._settle(step)
        summary = self._summarise("finished", step)
        self.close()
        self.mirror.complete()
        return summary

    def _settle(self, step: int) -> None:
        """Wait for the last save; a run whose end could not be saved has failed."""
        self.writer.wait()
        error = self.writer.error
        if error := self._world.from_leader(error and f"{host_name()}: {error}"):
            newest = next(store.committed(self.folder.checkpoints), None)
            message = f"the checkpoint of step {step} was not written on {error}. " + (
                f"The newest is {newest}; resume from it with: paceline train --resume {self.folder.path}"
                if newest
                else "There is none yet; start the same command again"
            )
            self._summarise("failed", step, message=message)
            self.close()
            raise UserError(message)

    def _summarise(self, status: str, step: int, **more: Any) -> dict[str, Any]:
        self._status = status
        if not self._world.is_leader:
            return {}
        summary = {"status": status, **more, **self._place(step), "total_steps": self.setup.total_steps}
        if status != "running":  # adding up a long run's records takes time
            summary |= totals(self.folder, self.setup)
        try:
            write_sealed(self.folder.summary, summary)
        except OSError as error:
            if status == "finished":
                raise UserError(f"{disk_error(error)}. All steps are done; start the same command again") from None
            if status == "running":
                self.disk.give(error)
        return summary

    def close(self) -> None:
        self.display.close()
        self.sink.close(self._status)


def _known(times: list[float]) -> bool:
    """Under FSDP the wait for others is not: it goes on all through forward and backward."""
    return not any(math.isnan(seconds) for seconds in times)
