"""Compares two models by their predictions of the same samples: McNemar's exact test, overall and per class."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.analysis.details.read import Details
from paceline.analysis.run import LoggedRun
from paceline.analysis.statistics import LEVEL, holm
from paceline.errors import UserError
from paceline.system.wording import counted


@dataclass(frozen=True)
class PairedClass:
    """How the predictions of one class, or of all images, differ between two models."""

    name: str
    samples: int
    accuracies: tuple[float, float]
    only_first: int
    """Images that only the first model predicts correctly."""
    only_second: int
    p: float
    """Of McNemar's exact test."""
    corrected: float
    """The p-value after Holm's correction for the number of classes."""

    @property
    def difference(self) -> float:
        return self.accuracies[1] - self.accuracies[0]

    @property
    def is_significant(self) -> bool:
        return self.corrected < LEVEL


@dataclass(frozen=True)
class PairedModels:
    """Two runs on the same samples of one split, or why they are not compared."""

    runs: tuple[str, str]
    title: str
    reason: str = ""
    """Why they are not compared; empty if they are."""
    overall: PairedClass | None = None
    classes: tuple[PairedClass, ...] = ()
    """Those with images, in the order of the classes."""
    settings: str = ""
    """How the evaluations differ, e.g. in test-time augmentation."""

    def changed(self, better: bool) -> list[PairedClass]:
        """Return the classes that got significantly better or worse in the second run, the largest change first."""
        found = [each for each in self.classes if each.is_significant and (each.difference > 0) == better]
        return sorted(found, key=lambda each: -abs(each.difference))

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        classes = [_plain(each) for each in self.classes]
        return {"runs": list(self.runs), "evaluation": self.title, "not_compared": self.reason or None} | {
            "settings": self.settings,
            "overall": _plain(self.overall) if self.overall else None,
            "classes": classes,
        }


def _plain(each: PairedClass) -> dict[str, Any]:
    return {
        "name": each.name,
        "samples": each.samples,
        "accuracies": list(each.accuracies),
        "only_first_correct": each.only_first,
        "only_second_correct": each.only_second,
        "p": each.p,
        "p_holm": each.corrected,
    }


def mcnemar(only_first: np.ndarray, only_second: np.ndarray) -> np.ndarray:
    """Return two-sided p-values of McNemar's exact test: if the models are equally good,
    either one is as likely to be right on a sample on which only one is."""
    from scipy.stats import binom

    less = np.minimum(only_first, only_second)
    return np.minimum(1.0, 2 * binom.cdf(less, only_first + only_second, 0.5))


def paired_runs(runs: Sequence[LoggedRun]) -> list[PairedModels]:
    """Compare the details of every run with those of the first one, split by split."""
    found = [(run.name, run.details[0]) for run in runs]
    if sum(bool(details) for _, details in found) < 2:
        return []
    (first, base), *others = found
    pairs = []
    for name, details in others:
        counterparts = [(_counterpart(each, base), each) for each in details]
        pairs += [_paired((first, own), (name, each)) for own, each in counterparts if own]
        if details and not any(own for own, _ in counterparts):
            reason = f"{first} has {_listed(base)}, but {name} has {_listed(details)}. Evaluate both on the same data"
            pairs.append(PairedModels((first, name), "", reason))
    return pairs


def _counterpart(details: Details, base: Sequence[Details]) -> Details | None:
    """Return the evaluation of the same split, if possible of the same data and not only of data with its name.

    Prepared data may have another name, because its fingerprint is that of its content; that of image files is not.
    """
    data = details.record["data"]
    named = [each for each in base if each.title == details.title]
    moved = [each for each in base if data.get("kind") == "shards" and each.record["data"]["split"] == data["split"]]
    same = (each for each in (*named, *moved) if not _difference(each, details))
    return next(same, named[0] if named else None)


def _listed(found: Sequence[Details]) -> str:
    return f"details of {' and '.join(each.title for each in found)}" if found else "no details"


def _paired(first: tuple[str, Details], second: tuple[str, Details]) -> PairedModels:
    (one, a), (two, b) = first, second
    try:
        reason = _difference(a, b)
        columns = [] if reason else [each.predictions() for each in (a, b)]
    except UserError as error:
        reason = error.report
    if not reason:
        reason = _other_samples(*columns)
    if reason:
        return PairedModels((one, two), b.title, reason)
    names = [entry["name"] for entry in a.record["classes"]]
    labels = columns[0]["label"]
    right = [each["predicted"] == each["label"] for each in columns]
    everything = _rows(["all images"], np.zeros_like(labels), right)[0]
    return PairedModels((one, two), b.title, "", everything, tuple(_rows(names, labels, right)), _settings(a, b))


def _settings(a: Details, b: Details) -> str:
    names = {"tta": "TTA", "weights": "weights", "precision": "precision"}
    values = [(name, a.record[key], b.record[key]) for key, name in names.items()]
    one, two = (each.record["data"].get("variant") or "none" for each in (a, b))
    values.append(("variants", one, two))
    return ", ".join(f"{name} {one} and {two}" for name, one, two in values if one != two)


def _difference(a: Details, b: Details) -> str:
    """Return why two evaluations cannot be compared, by what they are of."""
    if (found := [each.record["data"]["fingerprint"] for each in (a, b)]) and found[0] != found[1]:
        return f"they were evaluated on different data (fingerprints {found[0]} and {found[1]})"
    if a.record["classes"] != b.record["classes"]:
        return "the models have different classes"
    return ""


def _other_samples(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> str:
    if not np.array_equal(a["index"], b["index"]):
        different = len(np.setxor1d(a["index"], b["index"]))
        images = f"{counted(different, 'image')} {'was' if different == 1 else 'were'}"
        return f"{images} left out of only one of the evaluations"
    return "" if np.array_equal(a["label"], b["label"]) else "their labels differ"


def _rows(names: Sequence[str], groups: np.ndarray, right: Sequence[np.ndarray]) -> list[PairedClass]:
    """Return the comparison of every group that has samples."""
    totals, only_first, only_second, *hits = (
        np.bincount(groups[each], minlength=len(names))
        for each in (np.ones(len(groups), bool), right[0] & ~right[1], right[1] & ~right[0], *right)
    )
    present = np.flatnonzero(totals)
    p = mcnemar(only_first[present], only_second[present])
    return [
        PairedClass(
            names[number],
            int(totals[number]),
            (float(hits[0][number] / totals[number]), float(hits[1][number] / totals[number])),
            int(only_first[number]),
            int(only_second[number]),
            float(value),
            float(corrected),
        )
        for number, value, corrected in zip(present.tolist(), p, holm(p), strict=True)
    ]
