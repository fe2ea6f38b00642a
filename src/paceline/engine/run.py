"""Records what the training loop does in the run folder: metrics, checkpoints, summary.

Ranks other than 0 use null objects, so that the loop has no special cases.
"""

import math
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from paceline.checkpoint import store
from paceline.distributed.reports import report_progress
from paceline.distributed.world import World
from paceline.engine.build import Setup
from paceline.engine.callbacks import Callbacks, callback_error
from paceline.engine.checkpoints import Checkpoints
from paceline.engine.evaluation.assessment import Assessment
from paceline.engine.profiling import NoProfiler
from paceline.engine.replicas import Replicas, newest_step
from paceline.engine.resume import how_to_resume
from paceline.engine.totals import totals
from paceline.engine.window import Window, WindowFigures
from paceline.errors import UserError
from paceline.system import logs
from paceline.system.device import peak_memory
from paceline.system.files import disk_error
from paceline.system.logs import log
from paceline.track.progress import Display
from paceline.track.records import RunFolder
from paceline.track.sealed import write_sealed
from paceline.track.sinks import DiskWarning, Sink


@dataclass
class TrainingRun:
    """The outputs of a training run, on one rank."""

    folder: RunFolder
    setup: Setup
    sink: Sink
    checkpoints: Checkpoints
    display: Display
    replicas: Replicas
    callbacks: Callbacks
    assessment: Assessment
    first_step: int = 0
    disk: DiskWarning = field(default_factory=DiskWarning)
    window: Window = field(init=False)
    profiler: NoProfiler = field(default_factory=NoProfiler)
    _evaluation: dict[str, Any] = field(default_factory=dict)
    _saved: int = -1
    _scale: float = 0.0
    _status: str = "running"

    def __post_init__(self) -> None:
        self.window = Window(self._world.device)

    @property
    def _world(self) -> World:
        return self.setup.world

    def _place(self, step: int) -> dict[str, Any]:
        """Return the fields that every record has. `phase` is that of the step just completed."""
        timeline = self.setup.timeline
        return {"step": step, "epoch": timeline.epoch_at(step), "phase": timeline.phase_at(max(0, step - 1)).number}

    def log(self, step: int, lr: float) -> None:
        """Gather the metrics of all ranks since the last call and write a train record."""
        newest = newest_step(self.folder.checkpoints) if self.replicas.needed and self._world.is_rank_zero else -1
        figures, compile_seconds = self.window.take(), self.setup.compilation.take_seconds()
        local = replace(
            figures,
            compute_seconds=max(0.0, figures.compute_seconds - compile_seconds),
            compile_seconds=compile_seconds,
            num_corrupt=self.setup.loader.num_corrupt,
            peak_memory=peak_memory(self._world.device),
            newest_checkpoint=newest,
        )
        ranks = [WindowFigures.unpack(packed) for packed in self._world.gather(local.pack())]
        steps, images = ranks[0].steps, ranks[0].images
        if bad := [rank.first_bad for rank in ranks if rank.first_bad >= 0]:
            first = step - steps + 1 + min(bad)
            self._fail_not_finite(
                "loss-not-finite", f"the loss is not finite at step {first} (current learning rate {lr:.4g})", first - 1
            )
        split = {name: [rank.seconds[name] for rank in ranks] for name in ranks[0].seconds}
        seconds = {name: sum(times) / len(times) for name, times in split.items()}
        record = {
            "kind": "train",
            **self._place(step),
            "steps": steps,
            "lr": lr,
            "loss": sum(rank.loss for rank in ranks) / len(ranks) / steps,
            "top1": sum(rank.correct for rank in ranks) / images,
            "images": images,
            "images_per_second": images / sum(seconds.values()),
            "seconds": seconds,
        }
        if self.setup.scaler.is_enabled():
            record["loss_scale"] = scale = self.setup.scaler.get_scale()
            if scale < self._scale and self._world.is_rank_zero:
                skipped = "fp16 gradients overflowed before step %d; those steps were skipped, and the loss scale is %g"
                log.info(skipped, step, scale)
            self._scale = scale
        if compiling := max(rank.compile_seconds for rank in ranks):
            record["compile_seconds"] = compiling
        if corrupt := sum(rank.num_corrupt for rank in ranks):
            record["corrupt"] = corrupt
        if self._world.size > 1:
            record["seconds_per_rank"] = split
        record["memory_per_rank"] = [rank.peak_memory for rank in ranks]
        self.sink.write(record)
        self.display.train(record)
        report_progress(step)
        self.checkpoints.poll(ranks[0].newest_checkpoint)

    def _fail_not_finite(self, code: str, what: str, weights_of: int) -> None:
        """End the run. The weights after step `weights_of` are invalid, and so are later checkpoints."""
        self.checkpoints.complete()
        good = self._world.on_rank_zero(lambda: str(store.set_aside_from(self.folder.checkpoints, weights_of) or ""))
        where = f"the last good checkpoint is {good}" if good else "there is no earlier checkpoint"
        message = (
            f"{what}; {where}. Try a lower --optim.lr, a longer --optim.schedule.warmup, --optim.clip_grad_norm 1, "
            "or another --precision."
        )
        self._summarize("failed", weights_of, message=message)
        self.close()
        raise UserError(code, message, checkpoint=good)

    def evaluate(self, step: int, measure: Callable[..., dict[str, float]]) -> bool:
        """Evaluate with a progress display and write an eval record. Returns whether it is the best so far."""
        begin = time.perf_counter()
        with self.display.evaluating(self.setup.evaluator(step)) as advance:
            metrics = measure(on_batch=advance)
        seconds = time.perf_counter() - begin
        record = {"kind": "eval", **self._place(step), **metrics, "seconds": seconds}
        self.sink.write(record)
        self.display.evaluated(record)
        if not math.isfinite(metrics["loss"]):
            self._fail_not_finite(
                "validation-loss-not-finite", f"the validation loss is not finite after step {step}", step
            )
        self._evaluation = record
        self.callbacks.evaluation(record)
        self.window.restart()
        return self.assessment.add(record)

    def is_evaluated(self, step: int) -> bool:
        """Whether this session evaluated the newest step."""
        return self._evaluation.get("step") == step

    def is_saved(self, step: int) -> bool:
        """Whether this session began a checkpoint of the newest step, after its evaluation."""
        return self._saved == step

    def tested(self, step: int, metrics: dict[str, float]) -> None:
        """Write the record of the best checkpoint, that of this step, on the test split."""
        record = {"kind": "test", **self._place(step), **metrics}
        self.sink.write(record)
        self.display.tested(record)

    def give_up(self, step: int) -> None:
        """End a run that fell below its curve. Its checkpoint can be resumed with curve.stop=false."""
        self.wait_for_checkpoint(step)
        self._summarize("failed", step, message=self.assessment.below_curve)
        self.close()
        raise UserError(
            "below-expected-curve",
            f"{self.assessment.below_curve}. The run is stopped because of curve.stop=true. To continue it anyway: "
            f"paceline train --resume {self.folder.path} --curve.stop false",
            path=self.folder.path,
        )

    def save(self, step: int, setup: Setup) -> None:
        """Start writing a checkpoint. Training waits only for the copy to host memory."""
        begin = time.perf_counter()
        self._saved, measured = step, self._evaluation if self.is_evaluated(step) else {}
        kept = ("top1", "top5", "loss", "samples")
        metrics: dict[str, float] = {name: measured[name] for name in kept if name in measured}

        def copied() -> None:
            self.callbacks.checkpoint_written()  # the previous one, which was perhaps still being written at every step
            self.sink.write({"kind": "checkpoint", **self._place(step), "seconds": time.perf_counter() - begin})

        state, sync = partial(setup.state, step), partial(self._sync_records, step)
        self.callbacks.checkpoint(self.checkpoints.save(step, state, metrics, sync, copied))
        self.window.restart()

    def _sync_records(self, step: int) -> None:
        """Write all records to disk, in the background, before the checkpoint of this step is committed."""
        self.sink.flush()
        self._summarize("running", step)
        self.folder.sync()
        self.disk.clear()

    def begin(self) -> None:
        """Mark the run as running in its summary, and start its callbacks."""
        self._scale = self.setup.scaler.get_scale()
        self._summarize("running", self.first_step)
        self.callbacks.start(self.sink)

    def stopped(self, step: int) -> None:
        """Finish the last checkpoint and log how to resume, after a signal."""
        self.wait_for_checkpoint(step)
        self._end("interrupted", step)
        log.info("stopped after step %d; %s", step, how_to_resume(self.folder, self.setup.recipe, self._world))

    def failed(self, error: UserError) -> None:
        """Record why the run failed, unless its end is recorded already, and the traceback of user code."""
        self.checkpoints.wait()
        if self._world.is_rank_zero and self._status == "running":
            self._summarize("failed", self.folder.read_summary().get("step", self.first_step), message=str(error))
            logs.to_file_only(str(error))
            self.close()
        if error.__cause__:
            logs.to_file_only("".join(traceback.format_exception(error.__cause__)))

    def finish(self, step: int) -> dict[str, Any]:
        """Complete the run after its last step and return its summary."""
        self.wait_for_checkpoint(step)
        if failure := self._world.broadcast_object(self.callbacks.failure):
            self._summarize("failed", step, message=failure)
            self.close()
            raise callback_error(failure) from self.callbacks.cause
        early_stop = self.assessment.early_stop(step) or self.callbacks.early_stop(step)
        if early_stop and self._world.is_rank_zero:
            where = f"epoch {self._place(step)['epoch']:.4g} (step {step} of {self.setup.total_steps})"
            log.info("stopped early at %s by %s: %s", where, early_stop["stopped_by"], early_stop["stop_reason"])
        return self._end("finished", step, **early_stop)

    def _end(self, status: str, step: int, **more: Any) -> dict[str, Any]:
        """Close all outputs, and return the summary. On rank 0 trackers and callbacks may exceed the rank timeout."""
        with self._world.long_timeout():
            summary = self._summarize(status, step, **more)
            self.callbacks.end(summary)
            self.close()
            self.replicas.complete()
            self._world.barrier()
        return summary

    def wait_for_checkpoint(self, step: int) -> None:
        """Wait for the last checkpoint. A run whose last checkpoint cannot be written has failed."""
        self.checkpoints.complete()
        self.callbacks.checkpoint_written()
        if error := self.checkpoints.error():
            newest = next(store.committed(self.folder.checkpoints), None)
            message = f"the checkpoint of step {step} was not written on {error}. " + (
                f"The newest checkpoint is {newest}. Resume with: paceline train --resume {self.folder.path}"
                if newest
                else "There is no checkpoint yet. Run the same command again."
            )
            self._summarize("failed", step, message=message)
            self.close()
            raise UserError("checkpoint-not-written", message, step=step, path=self.folder.path)

    def _summarize(self, status: str, step: int, **more: Any) -> dict[str, Any]:
        self._status = status
        if not self._world.is_rank_zero:
            return {}
        if status == "failed":
            self.callbacks.checkpoint_written()
            self.callbacks.failed(more["message"])
        summary = {"status": status, **self._place(step), "total_steps": self.setup.total_steps, **more}
        if status != "running":  # reading all records of a long run takes time
            summary |= totals(self.folder, self.setup)
        try:
            write_sealed(self.folder.summary, summary)
        except OSError as error:
            if status == "finished":
                message = f"{disk_error(error)}. All steps are done. Run the same command again to write the summary."
                raise UserError("summary-not-written", message, path=self.folder.summary) from None
            if status == "running":
                self.disk.warn(error)
        return summary

    def close(self) -> None:
        self.display.close()
        self.sink.close(self._status)
