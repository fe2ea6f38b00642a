"""Preprocessing that pretrained weights expect: the recipe takes it from them, unless it sets its own."""

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from paceline.config.data import IN_MEMORY
from paceline.config.model import Model
from paceline.config.recipe import Recipe
from paceline.errors import UserError
from paceline.models import folders, hub
from paceline.models.factory import check, downloads, is_timm
from paceline.models.weight_files import find_file
from paceline.system.wording import counted

_MAX_SIDE = 4096


@dataclass(frozen=True)
class _Expected:
    """What the weights expect, as timm's pretrained_cfg names it."""

    origin: str
    values: Mapping[str, Any]

    def number(self, key: str, highest: float) -> Any:
        """Return a positive number up to `highest`, 0 if there is none. Files can hold anything."""
        value = self.values.get(key)
        if value is None:
            return 0
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= highest:
            return value
        raise self._invalid(key, value)

    def side(self, key: str) -> int:
        """Return the side of square images, 0 if there is none."""
        shape = self.values.get(key)
        if shape is None:
            return 0
        numbers = isinstance(shape, list | tuple) and all(type(each) is int for each in shape)
        if numbers and len(shape) in (2, 3) and shape[-1] == shape[-2] and 0 < shape[-1] <= _MAX_SIDE:
            return int(shape[-1])
        raise self._invalid(key, shape)

    def channels(self, key: str) -> tuple[float, ...]:
        values = self.values.get(key, ())
        valid = isinstance(values, list | tuple) and all(
            isinstance(each, int | float) and math.isfinite(each) and (each > 0 or key == "mean") for each in values
        )
        if not valid:
            raise self._invalid(key, values)
        return tuple(float(each) for each in values)

    def _invalid(self, key: str, value: Any) -> UserError:
        return UserError(
            "invalid-preprocessing",
            f"{self.origin}: {key}={value!r:.60} is not supported. Set data.size, data.mean, data.std, "
            "data.interpolation and evaluate.crop_pct in the recipe.",
            key=key,
        )


def resolve(recipe: Recipe) -> tuple[Recipe, list[str]]:
    """Return the recipe with the preprocessing that its weights expect in all fields that it does not set.

    Also returns what to log about it. A recipe with random weights, or one that sets all fields, stays as it is.
    """
    if recipe.model.weights == "random" or not _open_fields(recipe):
        return recipe, []
    check(recipe.model)
    if (expected := _expected(recipe.model)) is None:
        return recipe, []
    data, notes = recipe.data, []
    taken = _taken(recipe, expected)
    channels = {"digits": 1, "synthetic": data.synthetic.channels}.get(data.name, 3)
    if "data.mean" in taken and len(taken["data.mean"]) != channels:
        del taken["data.mean"], taken["data.std"]
        notes.append(f"mean and std are not those of {expected.origin}: the data has {counted(channels, 'channel')}")
    if (mode := expected.values.get("crop_mode", "center")) != "center":
        notes.append(f"{expected.origin} expects crop_mode={mode}, which is not supported; center crops are used")
    filtering = expected.values.get("interpolation", "bilinear")
    if filtering not in ("bilinear", "bicubic"):
        notes.append(
            f"{expected.origin} expects interpolation={filtering!r:.40}, which is not supported; bilinear is used"
        )
    if taken:
        values = ", ".join(f"{key}={_text(value)}" for key, value in taken.items())
        notes.insert(0, f"preprocessing of {expected.origin}: {values}")
    changed = {
        group: {key.split(".")[1]: value for key, value in taken.items() if key.startswith(f"{group}.")}
        for group in ("data", "evaluate")
    }
    resolved = replace(
        recipe, data=replace(data, **changed["data"]), evaluate=replace(recipe.evaluate, **changed["evaluate"])
    )
    return resolved, notes


def _text(value: Any) -> str:
    return "/".join(f"{each:g}" for each in value) if isinstance(value, tuple) else str(value)


def _open_fields(recipe: Recipe) -> set[str]:
    """Return the fields that weights may fill."""
    data, evaluate = recipe.data, recipe.evaluate
    empty = {
        "data.size": not data.size,
        "data.mean": not data.mean,
        "data.interpolation": data.interpolation == "auto",
        "evaluate.crop_pct": not evaluate.crop_pct and data.name not in IN_MEMORY,
    }
    return {field for field, is_open in empty.items() if is_open}


def _taken(recipe: Recipe, expected: _Expected) -> dict[str, Any]:
    """Return the values of the fields that the weights fill."""
    fields, taken = _open_fields(recipe), cast(dict[str, Any], {})
    sized = any(phase.size for phase in recipe.all_phases())
    at_test_size = 0
    if "data.size" in fields:
        built_for = _built_for(recipe.model)
        if side := built_for or expected.side("input_size"):
            taken["data.size"] = side
        fixed = built_for or expected.values.get("fixed_input_size") or sized or recipe.data.name in IN_MEMORY
        if not fixed and not recipe.evaluate.size:
            at_test_size = expected.side("test_input_size")
        if at_test_size:
            taken["evaluate.size"] = at_test_size
    if "evaluate.crop_pct" in fields:
        crop = (at_test_size and expected.number("test_crop_pct", 1)) or expected.number("crop_pct", 1)
        if crop:
            taken["evaluate.crop_pct"] = float(crop)
    if "data.interpolation" in fields and expected.values.get("interpolation") in ("bilinear", "bicubic"):
        taken["data.interpolation"] = expected.values["interpolation"]
    mean, std = expected.channels("mean"), expected.channels("std")
    if "data.mean" in fields and mean and len(mean) == len(std):
        taken["data.mean"], taken["data.std"] = mean, std
    return taken


def _built_for(model: Model) -> int:
    """Return the side that options of the model set, 0 if they do not."""
    side = model.options.get("img_size", 0)
    side = side[0] if isinstance(side, list | tuple) and side else side
    return side if type(side) is int and 0 < side <= _MAX_SIDE else 0


def _expected(model: Model) -> _Expected | None:
    """Return what the weights of a model expect: as their file, its folder, or timm says."""
    if model.weights == "pretrained":
        return _of_name(model)
    path = find_file(model.weights)
    if found := _of_file(path) or _beside(path, model):
        return found
    named = _of_name(model) if is_timm(model.name) else None
    return replace(named, origin=f"{named.origin} ({path} names none)") if named else None


def _of_name(model: Model) -> _Expected | None:
    import timm

    name = model.name
    if name.startswith("local-dir:"):
        config = folders.read_config(name)
        return _Expected(name, config.get("pretrained_cfg", config))
    if downloads(model) and name.startswith("hf-hub:"):
        return _Expected(name, hub.read_config(model)["pretrained_cfg"])
    found = timm.get_pretrained_cfg(name)
    tag = f".{found.tag}" if found and found.tag and "." not in name else ""
    return _Expected(f"timm's {name}{tag}", dataclasses.asdict(found)) if found else None


def _of_file(path: Path) -> _Expected | None:
    """Return what `paceline export` wrote into a file."""
    if path.suffix != ".safetensors":
        return None
    import safetensors

    try:
        with safetensors.safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
        found = json.loads(metadata["paceline"])["preprocessing"] if "paceline" in metadata else None
    except Exception:  # a corrupt file is reported when its weights are read
        return None
    if not isinstance(found, dict):
        return None
    return _Expected(str(path), {**found, "input_size": found.get("size")})


def _beside(path: Path, model: Model) -> _Expected | None:
    """Return what config.json in the folder of a file says, if it is about this model."""
    if not (path.parent / folders.CONFIG).is_file() or not is_timm(model.name):
        return None
    config = folders.read_json(path.parent / folders.CONFIG)
    found = config.get("pretrained_cfg", config)
    if not isinstance(found, dict) or config.get("architecture") != model.name.partition(".")[0]:
        return None
    return _Expected(str(path.parent / folders.CONFIG), found)
