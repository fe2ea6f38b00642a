"""The model card: data, recipe, metrics, limits and how to load the model, all from the record of the run."""

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

import yaml

from paceline.engine.export.loading import loading_code
from paceline.system.files import printable
from paceline.system.untrusted import read_regular
from paceline.track.records import RunFolder

_MAX_BYTES = 1 << 26
_MAX_CLASSES = 200
"""Classes listed in a card."""
_CLASS_FIGURES = ("recall", "recall_low", "recall_high")


def model_card(
    metadata: dict[str, Any],
    run: RunFolder | None,
    license: str = "",
    name: str = "",
    front_matter: bool = False,
    is_best: bool = False,
) -> str:
    """Return the card in Markdown. `run`: the run folder, which may have figures per class.

    `name`: that for timm.create_model, if it is known. `front_matter`: what the Hugging Face Hub reads. `is_best`:
    whether the checkpoint is the best one of its run.
    """
    title = f"{metadata['model']['name']} on {metadata['data']['name']}"
    classes = metadata["classes"]
    parts = [
        _front_matter(metadata, license) if front_matter else "",
        f"# {_safe(title)}\n\nAn image classifier with {len(classes)} classes, trained with "
        f"Paceline {_safe(metadata['versions'].get('paceline', ''))}."
        + (f" License: {_safe(license)}." if license else " No license is given for the weights."),
        _data(metadata, is_best),
        _training(metadata),
        _metrics(metadata, is_best),
        _per_class(metadata, run) if run else "",
        _limits(metadata),
        loading_code(metadata, name),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _safe(text: object) -> str:
    """Return text of the record for a table or a sentence: no markup, one line."""
    escaped = printable(str(text))
    for letter in ("\\", "`", "|", "<", ">", "*", "_", "[", "]", "#"):
        escaped = escaped.replace(letter, f"\\{letter}")
    return escaped


def _front_matter(metadata: dict[str, Any], license: str) -> str:
    """Return the YAML that the Hugging Face Hub reads."""
    results = [
        {"type": "accuracy", "name": f"top-1 ({split})", "value": round(figures["top1"], 6)}
        for split, figures in metadata["metrics"].items()
        if "top1" in figures
    ]
    fields: dict[str, Any] = {
        "library_name": "timm",
        "pipeline_tag": "image-classification",
        "tags": ["image-classification", "timm", "paceline"],
    }
    if license:
        fields["license"] = license
    if results:
        data = printable(metadata["data"]["name"])
        task = {"type": "image-classification", "name": "Image Classification"}
        # the Hub requires a type; the dataset may not be on the Hub
        entry = {"task": task, "dataset": {"name": data, "type": data}, "metrics": results}
        fields["metrics"] = ["accuracy"]
        fields["model-index"] = [{"name": metadata["model"]["name"], "results": [entry]}]
    return f"---\n{yaml.safe_dump(fields, sort_keys=False, allow_unicode=True)}---"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _data(metadata: dict[str, Any], is_best: bool) -> str:
    data = metadata["data"]
    counts = [f"{number:,} {split}" for split, number in data["splits"].items() if number]
    chosen = " The checkpoint was chosen on the val split." if is_best else ""
    about = f"{_safe(data['name'])} (fingerprint `{_safe(data['fingerprint'])}`): {', '.join(counts)} images."
    return f"## Data\n\n{about}{chosen}"


def _training(metadata: dict[str, Any]) -> str:
    recipe = metadata["recipe"]
    optim, train = (recipe.get(name, {}) for name in ("optim", "train"))
    facts = {
        "recipe": recipe.get("name"),
        "initial weights": recipe.get("model", {}).get("weights"),
        "epochs": f"{metadata['epoch']:g} (step {metadata['step']})",
        "planned duration": train.get("duration"),
        "global batch": train.get("global_batch"),
        "optimizer": optim.get("name"),
        "learning rate": optim.get("lr"),
        "weight decay": optim.get("weight_decay"),
        "label smoothing": train.get("label_smoothing"),
        "precision of training": metadata["precision"],
        "weights": "moving average (EMA)" if metadata["weights"] == "ema" else "as trained",
        "seed": recipe.get("seed"),
        "versions": ", ".join(f"{name} {version}" for name, version in metadata["versions"].items()),
    }
    rows = [[name, _safe(value)] for name, value in facts.items() if value not in (None, "")]
    return f"## Training\n\n{_table(['', ''], rows)}\n\nThe complete recipe is in the metadata of every export."


def _metrics(metadata: dict[str, Any], is_best: bool) -> str:
    head = "## Metrics\n\n"
    if not metadata["metrics"]:
        return f"{head}These weights have not been evaluated."
    rows = []
    for split, figures in metadata["metrics"].items():
        samples = figures.get("samples") or 0
        shown = [_percent(figures.get(name), samples) for name in ("top1", "top5")]
        loss = f"{figures['loss']:.4f}" if "loss" in figures else "-"
        rows.append([split, f"{samples:,}" if samples else "-", *shown, loss])
    how = f"Measured in {metadata['precision']}"
    tta = metadata["recipe"].get("evaluate", {}).get("tta", "none")
    how += f", with test-time augmentation ({_safe(tta)}), which exports do not apply." if tta != "none" else "."
    if metadata["precision"] != "fp32":
        how += " Exports compute in fp32, so their results may differ by rounding."
    text = "± is 2 standard errors. " if any("±" in cell for row in rows for cell in row) else ""
    chosen = " The val split chose the checkpoint, so its figures are optimistic for new images." if is_best else ""
    return f"{head}{_table(['split', 'images', 'top-1', 'top-5', 'loss'], rows)}\n\n{text}{how}{chosen}"


def _percent(value: float | None, samples: float) -> str:
    if value is None:
        return "-"
    error = f" ± {200 * math.sqrt(value * (1 - value) / samples):.2f}" if samples else ""
    return f"{100 * value:.2f}{error} %"


def _per_class(metadata: dict[str, Any], run: RunFolder) -> str:
    """Return tables from `paceline evaluate --details` of this checkpoint, if there are any."""
    sections = []
    for file in sorted(run.evaluations.glob("*/classes.csv")):
        is_own = _is_of(file.with_name("details.json"), run.path, metadata)
        rows = _class_rows(file, run.path) if is_own else []
        if rows:
            more = len(rows) - _MAX_CLASSES
            table = _table(["class", "images", "accuracy (95% interval)"], rows[:_MAX_CLASSES])
            note = f"\n\n{more} more classes are left out." if more > 0 else ""
            sections.append(f"## Accuracy per class ({_safe(file.parent.name)})\n\n{table}{note}")
    return "\n\n".join(sections)


def _is_of(details: Path, run: Path, metadata: dict[str, Any]) -> bool:
    """Whether an evaluation is of the exported weights, as far as its details say."""
    try:
        found = json.loads(read_regular(details, _MAX_BYTES, run))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(found, dict) and all(found.get(key) == metadata[key] for key in ("step", "weights"))


def _class_rows(file: Path, run: Path) -> list[list[str]]:
    try:
        text = read_regular(file, _MAX_BYTES, run).decode(errors="replace")
        found = list(csv.DictReader(io.StringIO(text)))
    except (OSError, csv.Error):
        return []
    rows = []
    for row in found:
        label, figures = row.get("name") or row.get("id"), [row.get(key) or "" for key in _CLASS_FIGURES]
        try:
            recall, low, high = (f"{100 * float(figure):.1f}" for figure in figures)
            accuracy = f"{recall} % ({low} to {high})"
        except ValueError:
            accuracy = "-"  # no images
        if label:
            rows.append([_safe(label), _safe(row.get("support") or "-"), accuracy])
    return rows


def _limits(metadata: dict[str, Any]) -> str:
    seen, classes = metadata["preprocessing"], [name for _, name in metadata["classes"]]
    height, width = seen["size"]
    listed = ", ".join(map(_safe, classes[:_MAX_CLASSES])) + (", ..." if len(classes) > _MAX_CLASSES else "")
    tested = [split for split in ("val", "test") if split in metadata["metrics"]]
    measured = f"on the {' and '.join(tested)} split of the data above only" if tested else "not at all"
    held_out = "" if "test" in tested else " There is no result on a test split that played no part in any choice."
    return (
        "## Limits\n\n"
        f"- It knows these {len(classes)} classes only, and gives every image one of them: {listed}.\n"
        f"- It was evaluated {measured}, not on other sources of images, nor for fairness or robustness.{held_out}\n"
        "- Its probabilities are not calibrated.\n"
        f"- It needs the preprocessing of its evaluation: center crop of {seen['crop_pct']:g} of the largest possible, "
        f"{seen['interpolation']} resize to {height}x{width} (height x width), scaled to 0..1, then normalized with "
        f"mean {_numbers(seen['mean'])} and standard deviation {_numbers(seen['std'])}."
    )


def _numbers(values: list[float]) -> str:
    return f"({', '.join(f'{value:.6g}' for value in values)})"
