"""Predicts the classes of many images, in any number of ranks, with the same result.

Whole batches are assigned to ranks in turn, so a batch has the same images, and the same logits, on any number of
ranks. After each round, rank 0 gathers the results and writes them in the order of the images.
"""

import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from paceline.config.data import Data
from paceline.config.recipe import Evaluate
from paceline.config.timeline import evaluation_phase
from paceline.data.load.batch import Batch
from paceline.data.load.in_memory import ResidentEvaluator
from paceline.data.load.loader import ImageEvaluator
from paceline.data.sets import ImageSet
from paceline.data.unlabeled import ImagePart, digest, find_images, read_list_of_names
from paceline.distributed.world import World
from paceline.engine.kernels import any_shape
from paceline.engine.memory import memory_of_prediction
from paceline.errors import UserError
from paceline.inference.classifier import Classifier
from paceline.inference.open_model import OpenedModel, Usage, open_model
from paceline.inference.prediction_files import ClassProbability, Write, check_target, writing
from paceline.system import logs
from paceline.system.logs import log
from paceline.system.wording import counted
from paceline.track.progress import Display, display


@dataclass(frozen=True)
class PredictionJob:
    """What to predict, and where the results go."""

    model: Path
    """A run, a checkpoint or an export."""
    inputs: tuple[str, ...] = ()
    """Images, folders, patterns, prepared data."""
    inputs_from: Path | None = None
    """A file with more of them."""
    files_from: Path | None = None
    """A file with names of images."""
    out: Path | None = None
    """None: standard output."""
    top: int = 5
    batch: int = 0
    """Images per rank; 0: that of the run's evaluation."""
    device: str = "auto"
    split: str = ""
    variant: str = ""
    usage: Usage = field(default_factory=Usage)


@dataclass(frozen=True)
class Counts:
    """How many images were predicted, and how many could not be read."""

    images: int
    skipped: int
    is_rank_zero: bool = True


def predict_images(job: PredictionJob) -> Counts:
    """Write the predictions of a job; called on every rank. UserError if no image can be read."""
    world = World.from_env(job.device)
    with world.connected():
        logs.set_up(world.rank, world.size)
        world.on_rank_zero(lambda: check_target(job.out, job.files_from))
        opened = open_model(job.model, world, job.usage)
        with world.long_timeout():  # data may be downloaded, and millions of files listed
            parts = world.raise_together(lambda: _inputs(job, opened))
            _check_same(parts, world)
        top, batch = min(job.top, len(opened.classifier.classes)), job.batch or opened.batch
        total, images = sum(map(len, parts)), 0
        with memory_of_prediction(batch, world), ExitStack() as stack:
            write = stack.enter_context(writing(job.out, top)) if world.is_rank_zero else _ignore
            # lines on a terminal show the progress themselves
            shown = display(world.is_rank_zero and (job.out is not None or not sys.stdout.isatty()))
            stack.enter_context(closing(shown))
            stack.enter_context(any_shape())
            for part in parts:
                images += _predict_part(part, opened, batch, top, world, write, shown)
            if not images:
                raise UserError(
                    "no-image-readable", f"none of {counted(total, 'image')} could be read. The log has the reasons."
                )
    if world.is_rank_zero and images < total:
        log.warning("skipped %d of %s that could not be read (see above)", total - images, counted(total, "image"))
    return Counts(images, total - images, world.is_rank_zero)


def _inputs(job: PredictionJob, opened: OpenedModel) -> list[ImagePart]:
    listed = read_list_of_names(job.files_from) if job.files_from else []
    inputs = [*job.inputs, *(read_list_of_names(job.inputs_from) if job.inputs_from else [])]
    return find_images(inputs, listed, job.split, job.variant, opened.variants)


def _check_same(parts: list[ImagePart], world: World) -> None:
    """Ranks list the files themselves, because there may be millions; they must find the same ones."""
    found = world.all_gather_object([sum(map(len, parts)), digest(parts)] if world.size > 1 else [])
    if any(other != found[0] for other in found):
        counts = ", ".join(str(count) for count, _ in found)
        message = f"the ranks find different images ({counts}). Give all nodes the same files, and do not change them."
        raise UserError("inputs-differ", message)


def _ignore(_name: str, _topk: Sequence[ClassProbability]) -> None: ...


def _predict_part(
    part: ImagePart, opened: OpenedModel, batch: int, top: int, world: World, write: Write, shown: Display
) -> int:
    """Predict the images of a part and write them in order. Returns how many could be read."""
    evaluator = _evaluator(part, opened, batch, world)
    rounds = -(-len(part) // (batch * world.size))
    count, kept = 0, list[np.ndarray]()
    with shown.evaluating(evaluator, "predicting") as advance:
        results = _results(opened.classifier, evaluator.batches(), batch, top)
        for _ in range(rounds):
            own = next(results, None)
            gathered = world.gather(own if own is not None else _no_rows(batch, top))
            rows = torch.cat(gathered).numpy()
            rows = rows[rows[:, 0] >= 0]
            count += len(rows)
            if world.is_rank_zero and opened.rectangular:  # batches are sorted by aspect ratio
                kept.append(rows)
            elif world.is_rank_zero:
                _write_rows(rows, part, opened.classifier, top, write)
            advance(0 if own is None else int((own[:, 0] >= 0).sum()))
    if kept:
        rows = np.concatenate(kept)
        _write_rows(rows[np.argsort(rows[:, 0], kind="stable")], part, opened.classifier, top, write)
    return count


def _evaluator(part: ImagePart, opened: OpenedModel, batch: int, world: World) -> ResidentEvaluator | ImageEvaluator:
    """Return the batches of this rank, as an evaluation reads them."""
    metadata = opened.classifier.metadata
    mean, std = metadata.colors
    data, place = Data(mean=mean, std=std, interpolation=metadata.interpolation), (world.rank, world.size, world.device)
    if isinstance(part.images, ImageSet):
        return ResidentEvaluator(data, part.images, metadata.size, batch, *place)
    evaluate = Evaluate(per_rank_batch=batch, crop_pct=metadata.crop_pct)
    phase = evaluation_phase(metadata.size, opened.rectangular)
    return ImageEvaluator(data, evaluate, phase, part.images, *place, torch.get_num_threads())


def _no_rows(batch: int, top: int) -> torch.Tensor:
    return torch.full((batch, 1 + 2 * top), -1, dtype=torch.int32)


def _results(classifier: Classifier, batches: Iterable[Batch], batch: int, top: int) -> Iterator[torch.Tensor]:
    """Yield a table per batch in host memory: id, numbers of classes, bits of probabilities; -1 for missing images.

    The next batch is started before the results of the current one are waited for.
    """
    started: deque[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = deque()
    for each in batches:
        if len(each.ids):
            started.append((each.ids, *classifier.best(classifier.logits(each.images), top)))
        else:
            started.append((each.ids, torch.empty(0, top), torch.empty(0, top)))
        if len(started) > 1:
            yield _table(batch, top, *started.popleft())
    while started:
        yield _table(batch, top, *started.popleft())


def _table(batch: int, top: int, ids: torch.Tensor, numbers: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
    rows = _no_rows(batch, top)
    parts = (
        ids[:, None].int(),
        numbers.int().cpu(),
        probabilities.float().cpu().view(torch.int32),
    )  # waits for the device
    rows[: len(ids)] = torch.cat(parts, dim=1)
    return rows


def _write_rows(rows: np.ndarray, part: ImagePart, classifier: Classifier, top: int, write: Write) -> None:
    numbers, probabilities = rows[:, 1 : 1 + top], np.ascontiguousarray(rows[:, 1 + top :]).view(np.float32)
    for id_, row, values in zip(rows[:, 0].tolist(), numbers.tolist(), probabilities.tolist(), strict=True):
        write(part.names[id_], classifier.named(row, values))
