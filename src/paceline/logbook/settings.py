"""What a run trained, in words: model, data, hyperparameters, and what its training loss is a loss of."""

from collections.abc import Iterator, Sequence
from typing import Any

from paceline.config.data import IN_MEMORY
from paceline.config.io import leaves
from paceline.logbook.read import Run
from paceline.system.files import printable
from paceline.system.remote import is_remote, shown

_OFF = "off"


def settings(run: Run) -> dict[str, str]:
    """By name, in the order in which a reader looks for them; what is not known, or off, is missing."""
    return {name: text for name, text in _texts(run).items() if text not in ("", _OFF)}


def _texts(run: Run) -> dict[str, str]:
    return {name: "" if value is None else printable(_text(value)) for name, value in _settings(run)}


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _settings(run: Run) -> Iterator[tuple[str, Any]]:
    fields = _fields(run)
    start = run.starts[-1] if run.starts else {}
    recorded = run.summary.get("data")
    recorded = recorded if isinstance(recorded, dict) else {}
    yield "recipe", fields.get("name")
    yield "model", fields.get("model.name")
    yield "parameters", _millions(run.summary.get("parameters"))
    yield "weights", fields.get("model.weights")
    yield "data", fields.get("data.name")
    yield "data path", _place(fields.get("data.path"))
    yield "classes", recorded.get("classes")
    yield "training images", recorded.get("train_images")
    yield "validation images", run.final.get("samples")
    yield "data fingerprint", start.get("data")
    yield "duration", _duration(fields.get("train.duration"))
    yield "global batch", _batches(run)
    yield "optimizer", fields.get("optim.name")
    yield "peak learning rate", _peak(run, fields)
    yield "schedule", _schedule(run, fields)
    yield "weight decay", fields.get("optim.weight_decay")
    yield "loss", {"cross-entropy": "cross entropy", "bce": "BCE"}.get(str(fields.get("train.loss")))
    yield "label smoothing", fields.get("train.label_smoothing")
    yield "mixup", _or_off(fields.get("train.mixup"))
    yield "cutmix", _or_off(fields.get("train.cutmix"))
    yield "image size", _sizes(run, fields)
    yield "precision", start.get("precision") or fields.get("precision")
    yield "EMA decay", _or_off(fields.get("ema.decay"))
    yield "seed", str(fields["seed"]) if "seed" in fields else None


def _place(path: Any) -> Any:
    """An address without its password."""
    return shown(path) if isinstance(path, str) and is_remote(path) else path


def _fields(run: Run) -> dict[str, Any]:
    """Fields of the recipe, or what another program's log tells of them, by their dotted names."""
    return run.facts | dict(leaves(run.recipe))


def _millions(parameters: int | None) -> str | None:
    return f"{parameters / 1e6:.3g} M" if parameters else None


def _duration(text: Any) -> str | None:
    if not isinstance(text, str):
        return None
    for unit, word in (("ep", "epochs"), ("ba", "steps")):
        if text.endswith(unit):
            return f"{text.removesuffix(unit)} {word}"
    return text


def _phases(run: Run) -> list[dict[str, Any]]:
    phases = run.recipe.get("phases")
    return [phase for phase in phases if isinstance(phase, dict)] if isinstance(phases, list | tuple) else []


def _batches(run: Run) -> str | int | None:
    own = run.recipe.get("train", {}).get("global_batch")
    sizes = list(dict.fromkeys(_text(phase.get("global_batch") or own) for phase in _phases(run)))
    return ", then ".join(sizes) if len(sizes) > 1 else run.global_batch


def _peak(run: Run, fields: dict[str, Any]) -> float | None:
    own = [rate for phase in _phases(run) if isinstance(rates := phase.get("lr"), list | tuple) for rate in rates]
    numbers = [rate for rate in own if isinstance(rate, int | float)]
    return float(max(numbers)) if numbers else fields.get("optim.lr")


def _schedule(run: Run, fields: dict[str, Any]) -> str | None:
    if any(phase.get("lr") for phase in _phases(run)):
        return f"by phase ({len(_phases(run))} phases)"
    name, warmup = fields.get("optim.schedule.name"), fields.get("optim.schedule.warmup")
    warm = isinstance(warmup, str) and not warmup.startswith("0")
    return f"{name}, warmup {_duration(warmup)}" if name and warm else name


def _sizes(run: Run, fields: dict[str, Any]) -> str | None:
    ramp = fields.get("ramp.sizes")
    own = fields.get("data.size") or (None if fields.get("data.name", IN_MEMORY[0]) in IN_MEMORY else 224)
    sizes = list(dict.fromkeys(str(phase.get("size") or own or "native") for phase in _phases(run)))
    if isinstance(ramp, list | tuple) and any(ramp):
        words = " to ".join(map(str, ramp))
    else:
        words = ", then ".join(sizes) or str(own or "")
    evaluated = fields.get("evaluate.size")
    return f"{words}, evaluated at {evaluated}" if words and evaluated and str(evaluated) != words else words


def softened(run: Run) -> list[str]:
    """What makes its training loss another measure than its validation loss."""
    fields = _fields(run)
    names = {"train.label_smoothing": "label smoothing", "train.mixup": "mixup", "train.cutmix": "cutmix"}
    found = [f"{name} {fields[key]:g}" for key, name in names.items() if _is_on(fields.get(key))]
    return ["BCE", *found] if fields.get("train.loss") == "bce" else found


def mixed(run: Run) -> list[str]:
    """What blends the images that its training accuracy is measured on."""
    return [word for word in softened(run) if word.startswith(("mixup", "cutmix"))]


def _or_off(value: Any) -> Any:
    return _OFF if value == 0 else value


def _is_on(value: Any) -> bool:
    return isinstance(value, int | float) and value > 0


def shared_and_differing(runs: Sequence[Run]) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Settings that all runs have alike; and those that differ, with the value of each run or an empty text."""
    each = [_texts(run) for run in runs]
    columns = {name: [own[name] for own in each] for name in each[0]}
    shared = {name: values[0] for name, values in columns.items() if len(set(values)) == 1}
    differing = {name: values for name, values in columns.items() if name not in shared}
    return {name: value for name, value in shared.items() if value not in ("", _OFF)}, differing
