"""Model, data and hyperparameters of a run as readable texts."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paceline.analysis.run import LoggedRun
from paceline.config.data import IN_MEMORY, dataset_name
from paceline.config.io import leaves
from paceline.system.files import printable
from paceline.system.remote import is_remote, redacted

_OFF = "off"
_CROSS_ENTROPY = "cross entropy"
_SHOWN_WEIGHTS = 5


def settings(run: LoggedRun) -> dict[str, str]:
    """Return the settings by name, the most important first, without unknown ones and those that are off."""
    return {name: text for name, text in _texts(run).items() if text not in ("", _OFF)}


def _texts(run: LoggedRun) -> dict[str, str]:
    return {name: "" if value is None else printable(_text(value)) for name, value in _settings(run)}


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _settings(run: LoggedRun) -> Iterator[tuple[str, Any]]:
    fields = _fields(run)
    start = run.starts[-1] if run.starts else {}
    recorded = run.summary.get("data")
    recorded = recorded if isinstance(recorded, dict) else {}
    yield "recipe", fields.get("name")
    yield "model", fields.get("model.name")
    yield "parameters", _millions(run.summary.get("parameters"))
    yield "weights", fields.get("model.weights")
    yield "frozen", _listed(fields.get("model.freeze"))
    yield "drop path rate", _or_off(fields.get("model.drop_path"))
    yield "data", data_name(run.summary, {key: fields.get(f"data.{key}") for key in ("name", "path")})
    yield "data path", _without_password(fields.get("data.path"))
    yield "classes", recorded.get("classes")
    yield "training images", recorded.get("train_images")
    yield "validation images", run.final.get("samples")
    yield "validated on", _listed(recorded.get("val_variants"))
    yield "test images", _or_off(recorded.get("test_images"))
    yield "data fingerprint", start.get("data")
    yield "duration", _duration(fields.get("train.duration"))
    yield "global batch", _batches(run)
    yield "optimizer", fields.get("optim.name")
    yield "peak learning rate", _peak(run, fields)
    yield "schedule", _schedule(run, fields)
    yield "layer decay", _or_off(fields.get("optim.layer_decay"), 1)
    yield "head learning rate", _times(fields.get("optim.head_lr_mult"))
    yield "weight decay", fields.get("optim.weight_decay")
    yield "loss", _loss(fields)
    yield "class weights", _class_weights(run)
    yield "sampler", _or_off(fields.get("data.sampler"), "shuffle")
    yield "label smoothing", fields.get("train.label_smoothing")
    yield "mixup", _or_off(fields.get("train.mixup"))
    yield "cutmix", _or_off(fields.get("train.cutmix"))
    yield "image size", _sizes(run, fields)
    yield "precision", start.get("precision") or fields.get("precision")
    yield "EMA decay", _or_off(fields.get("ema.decay"))
    yield "seed", str(fields["seed"]) if "seed" in fields else None


def data_name(summary: dict[str, Any], data: dict[str, Any]) -> str | None:
    """Return the name of the data, which the summary of a new run does not have yet."""
    if isinstance(recorded := summary.get("data"), dict) and recorded.get("name"):
        return str(recorded["name"])
    kind, path = (str(data.get(key) or "") for key in ("name", "path"))
    return dataset_name(kind, path) or None


def _without_password(path: Any) -> Any:
    return redacted(path) if isinstance(path, str) and is_remote(path) else path


def _fields(run: LoggedRun) -> dict[str, Any]:
    """Return the recipe's fields, or the facts in another program's log, by dotted name."""
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


def _phases(run: LoggedRun) -> list[dict[str, Any]]:
    phases = run.recipe.get("phases")
    return [phase for phase in phases if isinstance(phase, dict)] if isinstance(phases, list | tuple) else []


def _batches(run: LoggedRun) -> str | int | None:
    default = run.recipe.get("train", {}).get("global_batch")
    sizes = list(dict.fromkeys(_text(phase.get("global_batch") or default) for phase in _phases(run)))
    return ", then ".join(sizes) if len(sizes) > 1 else run.global_batch


def _peak(run: LoggedRun, fields: dict[str, Any]) -> float | None:
    rates = [rate for phase in _phases(run) if isinstance(each := phase.get("lr"), list | tuple) for rate in each]
    numbers = [rate for rate in rates if isinstance(rate, int | float)]
    lr = fields.get("optim.lr")
    if not numbers and fields.get("optim.schedule.name") == "piecewise" and isinstance(lr, int | float):
        points = fields.get("optim.schedule.points")
        listed = points if isinstance(points, list | tuple) else ()
        factors = [point.get("factor") for point in listed if isinstance(point, dict)]
        numbers = [lr * factor for factor in factors if isinstance(factor, int | float)]
    return float(max(numbers)) if numbers else lr


def _schedule(run: LoggedRun, fields: dict[str, Any]) -> str | None:
    if any(phase.get("lr") for phase in _phases(run)):
        return f"by phase ({len(_phases(run))} phases)"
    name, warmup = fields.get("optim.schedule.name"), fields.get("optim.schedule.warmup")
    warm = isinstance(warmup, str) and not warmup.startswith("0")
    return f"{name}, warmup {_duration(warmup)}" if name and warm else name


def _sizes(run: LoggedRun, fields: dict[str, Any]) -> str | None:
    ramp = fields.get("ramp.sizes")
    default = fields.get("data.size") or (None if fields.get("data.name", IN_MEMORY[0]) in IN_MEMORY else 224)
    sizes = list(dict.fromkeys(str(phase.get("size") or default or "native") for phase in _phases(run)))
    if isinstance(ramp, list | tuple) and any(ramp):
        text = " to ".join(map(str, ramp))
    else:
        text = ", then ".join(sizes) or str(default or "")
    evaluated = fields.get("evaluate.size")
    return f"{text}, evaluated at {evaluated}" if text and evaluated and str(evaluated) != text else text


def loss_modifiers(run: LoggedRun) -> list[str]:
    """Return the settings that make the training loss differ from cross entropy."""
    fields = _fields(run)
    names = {"train.label_smoothing": "label smoothing", "train.mixup": "mixup", "train.cutmix": "cutmix"}
    modifiers = [f"{name} {fields[key]:g}" for key, name in names.items() if _is_on(fields.get(key))]
    loss = _loss(fields)
    return modifiers if loss in (None, _CROSS_ENTROPY) else [loss, *modifiers]


def _loss(fields: Mapping[str, Any]) -> str | None:
    """Return the loss as reports name it; a registered one has its own name."""
    name = fields.get("train.loss")
    return None if name is None else {"cross-entropy": _CROSS_ENTROPY, "bce": "BCE"}.get(str(name), str(name))


def image_modifiers(run: LoggedRun) -> list[str]:
    """Return the settings that mix training images, which lowers the training accuracy."""
    return [text for text in loss_modifiers(run) if text.startswith(("mixup ", "cutmix "))]


def _listed(values: Any) -> str | None:
    return (", ".join(map(str, values)) or _OFF) if isinstance(values, list | tuple) else None


def _times(factor: Any) -> str | None:
    return None if factor is None else _OFF if factor == 1 else f"x {_text(factor)}"


def _class_weights(run: LoggedRun) -> str | None:
    train = run.recipe.get("train")
    weights = train.get("class_weights") if isinstance(train, dict) else None
    if isinstance(weights, dict):
        named = [f"{name}: {_text(weight)}" for name, weight in weights.items()]
        return ", ".join([*named[:_SHOWN_WEIGHTS], *(["..."] if named[_SHOWN_WEIGHTS:] else [])]) or _OFF
    return _OFF if weights == "none" else weights


def _or_off(value: Any, off: Any = 0) -> Any:
    return _OFF if value == off else value


def _is_on(value: Any) -> bool:
    return isinstance(value, int | float) and value > 0


def shared_and_differing(runs: Sequence[LoggedRun]) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Return the settings that all runs share, and those that differ with a value per run (empty: unknown)."""
    each = [_texts(run) for run in runs]
    columns = {name: [texts[name] for texts in each] for name in each[0]}
    shared = {name: values[0] for name, values in columns.items() if len(set(values)) == 1}
    differing = {name: values for name, values in columns.items() if name not in shared}
    return {name: value for name, value in shared.items() if value not in ("", _OFF)}, differing
