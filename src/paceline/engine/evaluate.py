"""Exact evaluation: every sample counts once on any number of ranks; sums are reduced, nothing is padded."""

import signal
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import torch
from torch import nn
from torch.nn import functional as F

from paceline.data.load.batch import Batch
from paceline.distributed.world import World
from paceline.errors import Stopped, UserError


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    num_classes: int,
    world: World,
    autocast: Callable[[], AbstractContextManager[object]],
    views: str = "none",
    on_batch: Callable[[int], object] = lambda _: None,
    stop: Callable[[], int] = lambda: 0,
) -> dict[str, float]:
    """Top-1, top-5 and loss over all ranks' batches, with the counts they come from.

    `chance` is what answering the most frequent class would reach, `predicted` how many classes were ever predicted.
    `on_batch` hears how many samples this rank has seen in each batch. Where `stop` gives any rank a signal, that rank
    leaves its remaining batches, and all ranks raise Stopped.
    """
    was_training = model.training
    model.eval()
    # float64 holds counts exactly, and the loss without a trace of the order in which ranks are added
    totals = torch.zeros(6, dtype=torch.float64, device=world.device)
    labels, predictions = torch.zeros(2, num_classes, dtype=torch.float64, device=world.device)
    for batch in batches:
        if signum := stop():
            totals[4 if signum == signal.SIGINT else 5] += 1
            break
        with autocast():
            logits = predict(model, batch.images, views)
        logits = logits.float()
        best = logits.topk(min(5, logits.shape[1]), dim=1).indices
        top = best == batch.labels[:, None]
        ones = torch.ones(len(batch.labels), dtype=torch.float64, device=world.device)
        labels.index_add_(0, batch.labels, ones)
        predictions.index_add_(0, best[:, 0], ones)
        totals[0] += len(batch.labels)
        totals[1] += top[:, 0].sum()
        totals[2] += top.any(1).sum()
        totals[3] += F.cross_entropy(logits, batch.labels, reduction="none").double().sum()
        on_batch(len(batch.labels))
    model.train(was_training)
    world.sum_(labels)
    world.sum_(predictions)
    samples, top1, top5, loss, *stops = world.sum_(totals).tolist()  # waits for the device: once an evaluation
    if any(stops):
        raise Stopped(signal.SIGINT if stops[0] else signal.SIGTERM)
    if not samples:
        raise UserError("not one validation image could be read; the lines above name them")
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


def refuse_damage(metrics: dict[str, float], expected: int, max_corrupt: float) -> None:
    """Samples that could not be read do not count; too many of them are an error, the same on all ranks."""
    lost = expected - int(metrics["samples"])
    if lost > max(1.0, max_corrupt * expected):
        raise UserError(
            f"{lost} of {expected} validation images could not be read, more than data.max_corrupt={max_corrupt}; "
            "the lines above name them"
        )


def predict(model: nn.Module, images: torch.Tensor, views: str) -> torch.Tensor:
    """Logits, averaged over the views asked for: mirrored, or mirrored and shifted by a pixel either way."""
    if views == "none":
        return model(images)
    logits = _both_ways(model, images)
    if views == "flip":
        return logits
    padded = F.pad(images, (1, 1, 1, 1), mode="reflect")
    shifted = [_both_ways(model, part) for part in (padded[..., :-2, :-2], padded[..., 2:, 2:])]
    return logits * 0.5 + (shifted[0] + shifted[1]) * 0.25


def _both_ways(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    return (model(images) + model(images.flip(-1))) / 2
