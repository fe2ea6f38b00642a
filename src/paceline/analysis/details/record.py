"""All figures of an evaluation as one dictionary, the content of details.json."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.analysis.details import metrics, suspects
from paceline.analysis.details.calibration import calibrated
from paceline.analysis.details.confusion import class_order, confused_pairs, confusion_cells
from paceline.analysis.details.scores import SampleScores, score

VERSION = 1
TRAINED_ON = "The model was trained on these images, so its figures are optimistic for new images."
_WORST, _UNCERTAIN, _LABEL_ERRORS, _PAIRS, _PER_PAIR = 24, 24, 48, 20, 4
_PAIRS_WITH_IMAGES = 12


@dataclass(frozen=True)
class EvaluatedSamples:
    """The samples of an evaluation in the order of their ids, without corrupt ones."""

    ids: np.ndarray
    labels: np.ndarray
    top: np.ndarray
    """The classes with the highest logits, in descending order: (n, 5), or fewer classes."""
    logits: np.ndarray
    """float32, (n, classes)."""
    names: Sequence[str]
    """The path of every sample of the dataset, by id; empty if it has none."""
    slices: Sequence[str | None] = ()
    """The slice of every sample of the dataset, by id; empty: none were asked for."""

    def name(self, number: int) -> str:
        """Return the path of the sample with this id."""
        return self.names[number] if self.names else ""


@dataclass(frozen=True)
class EvaluationFigures:
    """The figures of an evaluation: of samples, of cells of the confusion matrix, and all others."""

    samples: EvaluatedSamples
    scores: SampleScores
    cells: np.ndarray
    label_errors: np.ndarray
    """Positions, most suspicious first."""
    record: dict[str, Any]

    def shown(self) -> list[int]:
        """Return the ids of the samples that have a thumbnail."""
        return [image["index"] for image in self.record["images"]]


def figures(samples: EvaluatedSamples, slice_by: str = "") -> EvaluationFigures:
    """Compute everything from labels and logits."""
    num_classes = samples.logits.shape[1]
    scores = score(samples.labels, samples.logits, samples.top)
    cells = confusion_cells(scores, num_classes)
    rows = metrics.per_class(scores, num_classes)
    errors, _ = suspects.likely_label_errors(scores, samples.logits)
    pairs = confused_pairs(cells, _PAIRS)
    for number, pair in enumerate(pairs):
        pair["images"] = _of_pair(samples, scores, pair) if number < _PAIRS_WITH_IMAGES else []
    lists = {
        "worst": suspects.worst(scores, _WORST),
        "least_certain": suspects.least_certain(scores, _UNCERTAIN),
        "label_errors": errors[:_LABEL_ERRORS],
    }
    examples = {name: samples.ids[positions].tolist() for name, positions in lists.items()}
    shown = {index for ids in (*examples.values(), *(pair["images"] for pair in pairs)) for index in ids}
    record = {
        "overall": metrics.overall(scores) | metrics.macro(rows),
        "per_class": rows,
        "class_order": class_order(cells, num_classes),
        "confused_pairs": pairs,
        "calibration": calibrated(samples.labels, samples.logits, scores.confidence, scores.correct),
        "num_label_errors": len(errors),
        "examples": examples,
        "images": [_image(samples, scores, position) for position in np.flatnonzero(np.isin(samples.ids, [*shown]))],
    }
    if samples.slices:
        values = [samples.slices[number] for number in samples.ids.tolist()]
        record["slices"] = {"by": slice_by, "unmatched": values.count(None), "rows": metrics.per_slice(scores, values)}
    return EvaluationFigures(samples, scores, cells, errors, record)


def _of_pair(samples: EvaluatedSamples, scores: SampleScores, pair: dict[str, Any]) -> list[int]:
    """Return the ids of the most confident mistakes of one class for another."""
    found = np.flatnonzero((scores.labels == pair["label"]) & (scores.predicted == pair["predicted"]))
    order = np.argsort(-scores.confidence[found], kind="stable")[:_PER_PAIR]
    ids: list[int] = samples.ids[found[order]].tolist()
    return ids


def _image(samples: EvaluatedSamples, scores: SampleScores, position: np.intp) -> dict[str, Any]:
    columns = ("confidence", "p_label", "loss", "entropy")
    return {
        "index": int(samples.ids[position]),
        "path": samples.name(int(samples.ids[position])),
        "label": int(scores.labels[position]),
        "predicted": int(scores.predicted[position]),
    } | {name: float(getattr(scores, name)[position]) for name in columns}
