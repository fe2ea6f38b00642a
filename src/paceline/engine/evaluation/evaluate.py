"""Exact evaluation: every sample counts once on any number of ranks. Sums are all-reduced, and nothing is padded."""

import signal
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import torch
from torch import nn
from torch.nn import functional as F

from paceline.data.load.batch import Batch
from paceline.distributed.world import World
from paceline.errors import Stopped, UserError

Keep = Callable[[Batch, torch.Tensor, torch.Tensor, torch.Tensor], None]


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    num_classes: int,
    world: World,
    autocast: Callable[[], AbstractContextManager[object]],
    tta: str = "none",
    on_batch: Callable[[int], object] = lambda _: None,
    stop: Callable[[], int] = lambda: 0,
    keep: Keep = lambda *_: None,
) -> dict[str, float]:
    """Return top-1, top-5 and loss over all ranks' batches, with the counts they are computed from.

    `chance` is the accuracy of always predicting the most frequent class, `predicted` the number of classes that were
    predicted at least once. `on_batch` is called with the number of samples of each batch on this rank. If `stop`
    returns a signal on any rank, that rank skips its remaining batches, and all ranks raise Stopped. `keep` is called
    with every batch, its labels, its logits in fp32, and the classes with the highest logits.
    """
    was_training = model.training
    model.eval()
    # float64 holds counts exactly, and makes the loss independent of the order in which ranks are added
    counting = torch.device("cpu") if world.device.type == "mps" else world.device  # MPS has no float64
    totals = torch.zeros(6, dtype=torch.float64, device=counting)
    labels, predictions = torch.zeros(2, num_classes, dtype=torch.float64, device=counting)
    for batch in batches:
        if signum := stop():
            totals[4 if signum == signal.SIGINT else 5] += 1
            break
        with autocast():
            logits = predict(model, batch.images, tta)
        logits, truth = logits.float().to(counting), batch.labels.to(counting)
        best = logits.topk(min(5, logits.shape[1]), dim=1).indices
        top = best == truth[:, None]
        ones = torch.ones(len(truth), dtype=torch.float64, device=counting)
        labels.index_add_(0, truth, ones)
        predictions.index_add_(0, best[:, 0], ones)
        totals[0] += len(truth)
        totals[1] += top[:, 0].sum()
        totals[2] += top.any(1).sum()
        totals[3] += F.cross_entropy(logits, truth, reduction="none").double().sum()
        keep(batch, truth, logits, best)
        on_batch(len(truth))
    model.train(was_training)
    world.sum_(labels)
    world.sum_(predictions)
    samples, top1, top5, loss, *stops = world.sum_(totals).tolist()  # synchronizes with the device once per evaluation
    if any(stops):
        raise Stopped(signal.SIGINT if stops[0] else signal.SIGTERM)
    if not samples:
        raise UserError("no-validation-image-readable", "no image to evaluate could be read. The log lists them.")
    return {
        "samples": int(samples),
        "correct": int(top1),
        "correct5": int(top5),
        "top1": top1 / samples,
        "top5": top5 / samples,
        "loss": loss / samples,
        "chance": labels.max().item() / samples,
        "predicted": int((predictions > 0).sum()),
    }


def check_corrupt_fraction(metrics: dict[str, float], expected: int, max_corrupt: float) -> None:
    """Raise an error, the same on all ranks, if too many samples were left out because they could not be read."""
    lost = expected - int(metrics["samples"])
    if lost > max(1.0, max_corrupt * expected):
        raise UserError(
            "too-many-corrupt-samples",
            f"{lost} of {expected} images to evaluate could not be read, more than data.max_corrupt={max_corrupt}. "
            "The log lists them.",
            corrupt=lost,
            samples=expected,
        )


def predict(model: Callable[[torch.Tensor], torch.Tensor], images: torch.Tensor, tta: str) -> torch.Tensor:
    """Return logits, by test-time augmentation averaged in fp32: flipped, or flipped and translated by one pixel."""
    if tta == "none":
        return model(images)
    logits = _with_flip(model, images)
    if tta == "flip":
        return logits
    padded = F.pad(images, (1, 1, 1, 1), mode="reflect")
    shifted = [_with_flip(model, part) for part in (padded[..., :-2, :-2], padded[..., 2:, 2:])]
    return logits * 0.5 + (shifted[0] + shifted[1]) * 0.25


def _with_flip(model: Callable[[torch.Tensor], torch.Tensor], images: torch.Tensor) -> torch.Tensor:
    return (model(images).float() + model(images.flip(-1)).float()) / 2
