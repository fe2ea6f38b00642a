"""Compares an exported graph with the model on real images, in several batch sizes, before it gets its name."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.config.data import dataset_name
from paceline.config.timeline import Timeline
from paceline.data import kinds
from paceline.data.load.source import open_source
from paceline.data.pillow import MAX_BYTES, open_image
from paceline.data.unlabeled import image_files
from paceline.engine.evaluation.saved import evaluation_recipe
from paceline.engine.trained_model import Preprocess
from paceline.errors import UserError
from paceline.system.logs import console
from paceline.system.progress_bar import OneLineProgress, steps_of
from paceline.system.untrusted import Unreadable, read_regular
from paceline.system.wording import counted

NUM_IMAGES = 64
TOLERANCE = 1e-3
"""Largest difference of a logit, as a fraction of the largest logit, or of 1 if all are smaller."""
_BATCHES = (1, 2, 5)
_LAST_BATCH = 16  # the remaining images are compared in batches of up to 16


@dataclasses.dataclass(frozen=True)
class RealImages:
    """Preprocessed images, and where they come from."""

    pixels: torch.Tensor
    origin: str


def validation_images(progress: dict[str, Any], origin: str) -> RealImages:
    """Return some validation images of the data of a checkpoint, spread over the split."""
    recipe = evaluation_recipe(progress, origin, ["--evaluate.per_rank_batch", "1"])
    try:
        recipe = kinds.resolve(recipe)
        source = open_source(recipe, only_evaluate=True)
        phase = Timeline.of(recipe, source.num_train).phase_at(max(0, progress["step"] - 1))
        phase = dataclasses.replace(phase, rectangular=False)
        every = max(1, source.num_val // NUM_IMAGES)  # each "rank" gets every n-th batch, of one image
        batches = source.evaluator(phase, 0, every, torch.device("cpu"))
        images = [batch.images for batch, _ in zip(batches, range(NUM_IMAGES), strict=False)]
    except UserError as error:
        raise UserError(
            "export-needs-images",
            f"the data of the run cannot be read here: {error} To compare the export with the model on other images, "
            "give --images FILE|FOLDER.",
            cause=error.code,
        ) from None
    if not images:
        raise _no_images("the validation split")
    return RealImages(torch.cat(images), f"validation images of {dataset_name(recipe.data.name, source.place)}")


def images_at(path: Path, preprocess: Preprocess) -> RealImages:
    """Return the images of a file or a folder, preprocessed as in evaluation. Files that are
    not images are left out."""
    if not path.exists():
        raise UserError("images-not-found", f"--images {path} does not exist. Give an image or a folder.", path=path)
    files = image_files(str(path))
    every = max(1, len(files) // NUM_IMAGES)
    found = [pixels for file in files[::every][:NUM_IMAGES] for pixels in _decoded(Path(file), preprocess)]
    if not found:
        raise _no_images(str(path))
    return RealImages(torch.stack(found), f"images of {path}")


def _decoded(file: Path, preprocess: Preprocess) -> Iterator[torch.Tensor]:
    try:
        yield preprocess(open_image(read_regular(file, MAX_BYTES))[0])
    except (OSError, Unreadable):
        return


def _no_images(place: str) -> UserError:
    message = f"{place} has no image that can be read. Give others with --images FILE|FOLDER."
    return UserError("no-images-to-compare", message, path=place)


@torch.no_grad()
def compare(
    model: nn.Module, run: Callable[[torch.Tensor], torch.Tensor], images: RealImages, what: str
) -> dict[str, Any]:
    """Return how the logits of an exported graph differ from those of the model; an error beyond the tolerance."""
    batches = list(_batches(images.pixels))
    largest, highest, agreed = 0.0, 0.0, 0
    with OneLineProgress(steps_of, console=console) as bar:
        for batch in bar.track(batches, description=f"comparing {what} with the model"):
            expected, found = model(batch), _called(run, batch, what)
            if found.shape != expected.shape:
                shapes = f"logits of shape {tuple(found.shape)} instead of {tuple(expected.shape)}"
                raise _differs(what, f"it returns {shapes} for {counted(len(batch), 'image')}")
            if not found.isfinite().all():
                raise _differs(what, f"it returns NaN or infinite logits for {counted(len(batch), 'image')}")
            largest = max(largest, (found - expected).abs().max().item())
            highest = max(highest, expected.abs().max().item())
            agreed += int((found.argmax(1) == expected.argmax(1)).sum())
    allowed = TOLERANCE * max(1.0, highest)
    if largest > allowed:
        reason = f"a logit differs by {largest:.2g} on {images.origin}, more than {allowed:.2g}"
        raise _differs(what, reason, difference=largest)
    num = sum(map(len, batches))
    return {
        "runtime": what,
        "images": len(images.pixels),
        "origin": images.origin,
        "batch_sizes": sorted({len(batch) for batch in batches}),
        "largest_difference": largest,
        "largest_logit": highest,
        "top1_agreement": agreed / num,
    }


def _batches(pixels: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield batches of 1, 2 and 5 images, then the others; few images are repeated."""
    pixels = pixels.repeat(-(-sum(_BATCHES) // len(pixels)), 1, 1, 1) if len(pixels) < sum(_BATCHES) else pixels
    rest = len(pixels) - sum(_BATCHES)
    sizes = [*_BATCHES, *[_LAST_BATCH] * (rest // _LAST_BATCH), *filter(None, [rest % _LAST_BATCH])]
    yield from pixels.split(sizes)


def _called(run: Callable[[torch.Tensor], torch.Tensor], batch: torch.Tensor, what: str) -> torch.Tensor:
    try:
        return run(batch)
    except Exception as error:  # of ONNX Runtime or torch
        reason = f"it fails on {counted(len(batch), 'image')} ({' '.join(str(error).split())[:200]})"
        raise _differs(what, reason) from None


def _differs(what: str, reason: str, **fields: object) -> UserError:
    message = f"{what} does not compute what the model computes: {reason}. Nothing was written; try another format."
    return UserError("export-differs", message, **fields)


def summary(comparison: dict[str, Any]) -> str:
    """Return a line about a comparison."""
    sizes = ", ".join(map(str, comparison["batch_sizes"]))
    return (
        f"{comparison['runtime']} compared with the model on {comparison['images']} {comparison['origin']} (batches of "
        f"{sizes}): largest difference of a logit {comparison['largest_difference']:.2g} (largest logit "
        f"{comparison['largest_logit']:.3g}), same top-1 for {comparison['top1_agreement']:.2%}"
    )
