"""Keeps the logits of every sample of an evaluation, gathers them on rank 0, and writes what the model gets wrong."""

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image

from paceline.analysis.details.read import read_details
from paceline.analysis.details.record import VERSION, EvaluatedSamples, figures
from paceline.analysis.details.slices import DetailsSpec, slice_values
from paceline.analysis.details.write import DETAILS, other_file, write_details
from paceline.data.load.batch import Batch
from paceline.data.load.source import Evaluator
from paceline.data.splits import ALL
from paceline.distributed.world import World
from paceline.errors import UserError
from paceline.system.files import disk_error, disk_error_code, make_folder, printable
from paceline.system.untrusted import leads_out
from paceline.track.records import RunFolder

T = TypeVar("T")
_CHUNK_BYTES = 16 << 20  # of each rank's logits that are gathered at a time
_SIDE, _QUALITY = 96, 75
_MAX_LISTED = 1000  # corrupt samples
_MAX_BYTES = 16 << 30  # of all logits, which rank 0 holds


class KeptLogits:
    """The ids, labels and logits of this rank's samples."""

    def __init__(self, samples: int, num_classes: int):
        self._count, self._top = 0, min(5, num_classes)
        self._integers = torch.full((samples, 2 + self._top), -1, dtype=torch.int64)
        self._logits = torch.empty(samples, num_classes)

    def keep(self, batch: Batch, labels: torch.Tensor, logits: torch.Tensor, top: torch.Tensor) -> None:
        """Keep a batch; this waits for the device."""
        rows = slice(self._count, self._count + len(labels))
        self._integers[rows] = torch.cat([batch.ids[:, None], labels.cpu()[:, None], top.cpu()], dim=1)
        self._logits[rows] = logits.cpu()
        self._count = rows.stop

    def gathered(self, world: World) -> tuple[np.ndarray, np.ndarray]:
        """Return integers (id, label, top classes) and logits of all samples by id; only rank 0 has logits.

        Logits are gathered in chunks, since all of them would take too much memory on every rank.
        """
        counts = [int(count) for count in world.gather(torch.tensor([self._count]))]
        most, classes = max(counts), self._logits.shape[1]
        parts = world.gather(_padded(self._integers, slice(0, most)))
        integers = torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
        order = integers[:, 0].argsort()
        if world.size == 1:
            return integers[order].numpy(), self._sorted(order).numpy()
        places = order.argsort().split(counts)  # of each rank's samples among all
        logits = torch.empty(len(order) if world.is_rank_zero else 0, classes)
        step = max(1, _CHUNK_BYTES // (4 * classes))
        for begin in range(0, most, step):
            chunk = world.gather(_padded(self._logits, slice(begin, min(begin + step, most))))
            for place, values in zip(places if world.is_rank_zero else (), chunk, strict=False):
                rows = place[begin : begin + step]
                logits[rows] = values[: len(rows)]
        return integers[order].numpy(), logits.numpy()

    def _sorted(self, order: torch.Tensor) -> torch.Tensor:
        """Return the logits in another order, without holding them twice. They are sorted in place."""
        logits = self._logits[: len(order)]
        for columns in logits.split(max(1, _CHUNK_BYTES // (4 * max(1, len(order)))), dim=1):
            columns.copy_(columns[order])
        return logits


def _padded(tensor: torch.Tensor, rows: slice) -> torch.Tensor:
    """Return rows of a tensor; those beyond its end are zero, since all ranks gather the same shape."""
    padded = torch.zeros(rows.stop - rows.start, tensor.shape[1], dtype=tensor.dtype)
    part = tensor[rows]
    padded[: len(part)] = part
    return padded


class DetailsWriter:
    """Writes the details of one evaluation. Its methods are called on all ranks."""

    def __init__(self, spec: DetailsSpec, facts: Mapping[str, Any], checkpoint: Path, batches: Evaluator, world: World):
        """Find the folder and the slices, so that an error comes before the evaluation takes its time.

        `facts`: what is evaluated, as details.json has it.
        """
        self._spec, self._facts, self._batches, self._world = spec, facts, batches, world
        self._folder, self._names, self._slices = Path(), list[str](), list[str | None]()
        num_classes = len(facts["classes"])
        if (size := 4 * batches.num_samples * num_classes) > _MAX_BYTES:
            message = (
                f"--details needs {size / 1e9:.0f} GB of host memory for the logits of {batches.num_samples} images "
                f"and {num_classes} classes, more than {_MAX_BYTES / 1e9:.0f} GB. Evaluate fewer images."
            )
            raise UserError("too-many-logits", message, samples=batches.num_samples)
        world.on_rank_zero(lambda: _reported(lambda: self._prepare(checkpoint)))
        self._kept = KeptLogits(batches.rank_samples, num_classes)
        self.keep = self._kept.keep

    def _prepare(self, checkpoint: Path) -> None:
        data, names = self._facts["data"], self._batches.names
        self._folder = details_folder(self._spec, checkpoint, data)
        if self._spec.slice_by:
            found = slice_values(self._spec, names, Path(data["place"]) if data["kind"] == "list" else None)
            self._slices = [value if value is None else printable(value) for value in found]
        self._names = [printable(name) for name in names]
        make_folder(self._folder)

    def write(self) -> str:
        """Gather the logits, and write the folder on rank 0. Returns its path."""
        integers, logits = self._kept.gathered(self._world)
        with self._world.long_timeout():
            return self._world.on_rank_zero(lambda: _reported(lambda: self._write(integers, logits)))

    def _write(self, integers: np.ndarray, logits: np.ndarray) -> str:
        if not np.isfinite(logits).all():
            message = "The model returns NaN or infinite logits, so no details can be written. Check the training loss."
            raise UserError("logits-not-finite", message)
        ids = integers[:, 0]
        samples = EvaluatedSamples(ids, integers[:, 1], integers[:, 2:], logits, self._names, self._slices)
        found = figures(samples, self._spec.slice_by)
        absent = np.setdiff1d(np.arange(self._batches.num_samples), ids).tolist()
        corrupt = [{"index": number, "path": samples.name(number)} for number in absent[:_MAX_LISTED]]
        data = {**self._facts["data"], "num_corrupt": len(absent), "corrupt": corrupt}
        facts = {"version": VERSION, **self._facts, "data": data}
        write_details(self._folder, found, facts, thumbnails(self._batches, found.shown()))
        return str(self._folder)


def _reported(action: Callable[[], T]) -> T:
    """Return the result of an action; errors of the disk become UserErrors, which all ranks raise together."""
    try:
        return action()
    except OSError as error:
        raise UserError(disk_error_code(error), disk_error(error), path=error.filename) from None


def details_folder(spec: DetailsSpec, checkpoint: Path, data: Mapping[str, Any]) -> Path:
    """Return the folder to write: that of --out, else RUN/evaluations/DATA-SPLIT, or DATA without splits."""
    if spec.out:
        if spec.out.exists() and not spec.out.is_dir():
            raise UserError("output-is-a-file", f"--out {spec.out} is a file. Give a folder.", path=spec.out)
        if other := other_file(spec.out):
            message = f"--out {spec.out} contains other files ({printable(other)}). Choose another folder."
            raise UserError("output-has-other-data", message, path=spec.out)
        return spec.out
    run = RunFolder.of_checkpoint(checkpoint)
    if run is None or not run.exists:
        message = f"{checkpoint} is not in a run folder. Say where to write the details: --out DIR"
        raise UserError("missing-option", message, option="--out")
    if leads_out(run.path, run.evaluations):
        message = f"{run.evaluations} is a link to a folder outside {run.path}. Replace it with a folder."
        raise UserError("link-outside-folder", message, path=run.evaluations)
    name = (
        "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in data["name"]).strip(".") or "data"
    )
    folder = run.evaluations / (name[:80] if data["split"] == ALL else f"{name[:80]}-{data['split']}")
    return folder if _is_same(folder, data) else folder.with_name(f"{folder.name}-{data['fingerprint'][:8]}")


def _is_same(folder: Path, data: Mapping[str, Any]) -> bool:
    """Return whether a folder holds no details, or those of the same data."""
    if not (folder / DETAILS).is_file():
        return True
    try:
        return read_details(folder).record["data"]["fingerprint"] == data["fingerprint"]
    except UserError:
        return True  # corrupt: to be replaced


def thumbnails(batches: Evaluator, ids: list[int]) -> dict[int, bytes]:
    """Return small WebP files of samples by id, without corrupt ones and those that have neither 1 nor 3 channels."""
    return {number: _webp(pixels) for number, pixels in batches.pictures(ids, _SIDE) if pixels.shape[2] in (1, 3)}


def _webp(pixels: np.ndarray) -> bytes:
    image = Image.fromarray(pixels.squeeze(2) if pixels.shape[2] == 1 else pixels).convert("RGB")
    content = io.BytesIO()
    # compression would blur images of some pixels
    image.save(content, "webp", quality=_QUALITY, lossless=max(image.size) < _SIDE)
    return content.getvalue()
