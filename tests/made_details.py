"""Make the details of an evaluation with known labels and logits, in the engine's format."""

from pathlib import Path
from typing import Any

import numpy as np

from paceline.analysis.details.record import VERSION, EvaluatedSamples, EvaluationFigures, figures
from paceline.analysis.details.write import write_details
from paceline.engine.evaluation.details import _webp


def made_logits(classes: int, samples: int, seed: int = 0, strength: float = 3.0) -> tuple[np.ndarray, np.ndarray]:
    """Return labels and float32 logits; classes are confused with their neighbors."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, samples)
    logits = rng.normal(size=(samples, classes)).astype(np.float32)
    logits[np.arange(samples), labels] += strength
    logits[np.arange(samples), labels ^ 1 if classes % 2 == 0 else labels] += strength / 2
    return labels, logits


def made_figures(labels: np.ndarray, logits: np.ndarray, **more: Any) -> EvaluationFigures:
    """Return all figures of these predictions."""
    top = np.argsort(-logits, axis=1, kind="stable")[:, : min(5, logits.shape[1])]
    names = more.pop("names", [f"folder/{number}.jpg" for number in range(len(labels))])
    ids = more.pop("ids", np.arange(len(labels)))
    return figures(EvaluatedSamples(ids, labels, top, logits, names, more.pop("slices", ())), **more)


def make_details(
    run: Path,
    labels: np.ndarray,
    logits: np.ndarray,
    *,
    class_names: list[str] | None = None,
    fingerprint: str = "d1",
    split: str = "val",
    own: bool = True,
    name: str = "made",
    step: int = 40,
    side: int = 8,
    **more: Any,
) -> Path:
    """Write the details of an evaluation to a run folder. Returns their folder."""
    found = made_figures(labels, logits, **more)
    class_names = class_names or [f"class {number}" for number in range(logits.shape[1])]
    data = {"name": name, "kind": "shards", "place": f"/data/{name}", "split": split, "fingerprint": fingerprint}
    data |= {"own": own, "trained_on": own and split in ("train", "all")}
    facts = {"version": VERSION, "checkpoint": f"step-{step:08d}", "step": step, "weights": "ema", "tta": "none"}
    facts |= {"precision": "fp32", "data": data | {"num_corrupt": 0, "corrupt": []}}
    facts["classes"] = [{"id": name, "name": name} for name in class_names]
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (side // 8, side // 8, 3), np.uint8).repeat(8, 0).repeat(8, 1)
    folder = run / "evaluations" / f"{name}-{split}"
    write_details(folder, found, facts, dict.fromkeys(found.shown(), _webp(pixels)))
    return folder
