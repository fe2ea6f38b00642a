"""The model card: data, recipe, metrics, limitations and how to load the model, all from the record of the run."""

import math
from collections.abc import Sequence
from typing import Any

import yaml

from paceline.analysis.details.read import Details, details_of
from paceline.analysis.details.record import TRAINED_ON
from paceline.analysis.run import shows_top5
from paceline.data.splits import TEST, VAL, split_title
from paceline.exports.loading import loading_code
from paceline.system.files import printable
from paceline.track.records import RunFolder

_MAX_CLASSES = 200
"""Classes listed in a card."""


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
    classes, evaluations = metadata["classes"], _evaluations(metadata, run) if run else []
    parts = [
        _front_matter(metadata, license) if front_matter else "",
        f"# {_safe(title)}\n\nAn image classifier with {len(classes)} classes, trained with "
        f"Paceline {_safe(metadata['versions'].get('paceline', ''))}."
        + (f" License: {_safe(license)}." if license else " No license is given for the weights."),
        _data(metadata, is_best),
        _training(metadata),
        _metrics(metadata, is_best),
        _per_class(evaluations),
        _limitations(metadata, evaluations),
        loading_code(metadata, name),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _evaluations(metadata: dict[str, Any], run: RunFolder) -> list[Details]:
    """Return the evaluations with `--details` of the exported weights."""
    keys = ("step", "weights")
    return [each for each in details_of(run.path)[0] if all(each.record[key] == metadata[key] for key in keys)]


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
        "initial weights": _initial_weights(recipe.get("model", {})),
        "epochs": f"{round(metadata['epoch'], 2):g} (step {metadata['step']})",
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


def _initial_weights(model: dict[str, Any]) -> str | None:
    weights, name = model.get("weights"), model.get("name", "")
    return f"{weights} ({name})" if weights == "pretrained" else weights


def _metrics(metadata: dict[str, Any], is_best: bool) -> str:
    head = "## Metrics\n\n"
    if not metadata["metrics"]:
        return f"{head}These weights have not been evaluated."
    names = {"top1": "top-1"} | ({"top5": "top-5"} if shows_top5(len(metadata["classes"])) else {})
    rows = []
    for split, figures in metadata["metrics"].items():
        samples = figures.get("samples") or 0
        shown = [_percent(figures.get(name), samples) for name in names]
        loss = f"{figures['loss']:.4f}" if "loss" in figures else "-"
        rows.append([split, f"{samples:,}" if samples else "-", *shown, loss])
    how = f"Measured in {metadata['precision']}"
    tta = metadata["recipe"].get("evaluate", {}).get("tta", "none")
    how += f", with test-time augmentation ({_safe(tta)}), which exports do not apply." if tta != "none" else "."
    if metadata["precision"] != "fp32":
        how += " Exports compute in fp32, so their results may differ by rounding."
    text = "± is 2 standard errors. " if any("±" in cell for row in rows for cell in row) else ""
    chosen = (
        " The checkpoint was chosen on the val split, so its figures on val are optimistic for new images."
        if is_best
        else ""
    )
    return f"{head}{_table(['split', 'images', *names.values(), 'loss'], rows)}\n\n{text}{how}{chosen}"


def _percent(value: float | None, samples: float) -> str:
    if value is None:
        return "-"
    error = f" ± {200 * math.sqrt(value * (1 - value) / samples):.2f}" if samples else ""
    return f"{100 * value:.2f}{error} %"


def _per_class(evaluations: Sequence[Details]) -> str:
    """Return a table of every evaluation with `--details` of these weights."""
    return "\n\n".join(map(_class_section, evaluations))


def _class_section(details: Details) -> str:
    record = details.record
    names = [entry["name"] for entry in record["classes"]]
    rows = [
        [_safe(names[row["class"]]), f"{row['support']:,}", _recall(row)] for row in record["per_class"][:_MAX_CLASSES]
    ]
    notes = [f"The other classes ({more:,}) are left out."] if (more := len(names) - _MAX_CLASSES) > 0 else []
    tta = record["tta"]
    how = "without" if tta == "none" else f"with {_safe(tta)} as"
    notes.append(f"Measured in {_safe(record['precision'])}, {how} test-time augmentation.")
    if record["data"]["trained_on"]:
        notes.append(TRAINED_ON)
    table = _table(["class", "images", "accuracy (95% CI)"], rows)
    return f"## Accuracy per class: {_safe(details.title)}\n\n{table}\n\n{' '.join(notes)}"


def _recall(row: dict[str, Any]) -> str:
    if not row["interval"]:
        return "-"  # no images
    low, high = row["interval"]
    return f"{100 * row['recall']:.1f} % ({100 * low:.1f} to {100 * high:.1f})"


def _limitations(metadata: dict[str, Any], evaluations: Sequence[Details]) -> str:
    seen, classes = metadata["preprocessing"], [name for _, name in metadata["classes"]]
    height, width = seen["size"]
    listed = ", ".join(map(_safe, classes[:_MAX_CLASSES])) + (", ..." if len(classes) > _MAX_CLASSES else "")
    return (
        "## Limitations\n\n"
        f"- It knows these {len(classes)} classes only, and gives every image one of them: {listed}.\n"
        f"- {_evaluated(metadata, evaluations)}\n"
        f"- Its probabilities are not calibrated.{_temperature(evaluations)}\n"
        f"- It needs the preprocessing of its evaluation: {'gray, ' if len(seen['mean']) == 1 else ''}center crop of "
        f"{seen['crop_pct']:g} of the largest possible, {seen['interpolation']} resize to {height}x{width} "
        f"(height x width), scaled to 0..1, then normalized with mean {_numbers(seen['mean'])} and "
        f"standard deviation {_numbers(seen['std'])}."
    )


def _evaluated(metadata: dict[str, Any], evaluations: Sequence[Details]) -> str:
    """Return what the model was evaluated on, and what is unknown."""
    name = _safe(metadata["data"]["name"])
    measured = [f"{name}, {split_title(split)}" for split in (VAL, TEST) if split in metadata["metrics"]]
    new = [each for each in evaluations if not each.record["data"]["trained_on"]]
    places = list(dict.fromkeys([*measured, *(_safe(each.title) for each in new)]))
    if not places:
        return "It was not evaluated on images that it was not trained on."
    own = {each.record["data"]["split"] for each in new if each.record["data"]["own"]}
    held_out = "" if TEST in {*metadata["metrics"], *own} else f" There is no result on a test split of {name}."
    return (
        f"It was evaluated on these images only: {'; '.join(places)}. It was not evaluated on other sources of images, "
        f"nor for fairness or robustness.{held_out}"
    )


def _temperature(evaluations: Sequence[Details]) -> str:
    """Return how to calibrate the model, if that is known from the validation images of its run."""
    for each in evaluations:
        data, found = each.record["data"], each.record["calibration"]
        if data["own"] and data["split"] == VAL and found["temperature"] is not None:
            return (
                f" Dividing its logits by {found['temperature']:.3g} minimizes the loss on the val split; it changes "
                f"the expected calibration error there from {found['ece']:.2%} to {found['ece_after']:.2%}."
            )
    return ""


def _numbers(values: list[float]) -> str:
    return f"({', '.join(f'{value:.6g}' for value in values)})"
