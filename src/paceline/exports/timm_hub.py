"""Writes a folder in the format of timm's models on the Hugging Face Hub: config.json, model.safetensors, README.md."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.errors import UserError
from paceline.models.factory import is_timm
from paceline.models.folders import WEIGHTS_FILE
from paceline.system.files import write_json
from paceline.system.wording import counted

CONFIG, CARD = "config.json", "README.md"
FILES = (CONFIG, WEIGHTS_FILE, CARD)
_KEPT = ("pool_size", "first_conv", "classifier", "fixed_input_size", "min_input_size")
"""What timm needs to know about the architecture; its weights are no longer the published ones."""


def check_is_timm(name: str) -> None:
    """Refuse models that timm cannot create."""
    if not is_timm(name):
        message = f"model.name={name} is not a timm model, so timm cannot load it. Use --to FILE.safetensors or .onnx."
        raise UserError("not-a-timm-model", message, model=name)


def config_of(model: nn.Module, metadata: dict[str, Any]) -> dict[str, Any]:
    """Return timm's config.json for a model."""
    seen, arguments = metadata["preprocessing"], metadata["model"]
    published: dict[str, Any] = model.pretrained_cfg  # type: ignore[assignment]
    options = dict(arguments["options"])
    if published.get("fixed_input_size"):  # otherwise timm would take it from input_size, and resample the weights
        options.setdefault("img_size", list(published["input_size"][1:]))
    kept = {name: published[name] for name in _KEPT if published.get(name) is not None}
    if arguments["in_chans"] != 3:
        kept.pop("first_conv", None)  # timm would convert the weights of this layer from three channels
    ids, names = zip(*metadata["classes"], strict=True)
    return {
        "architecture": published["architecture"],
        "num_classes": arguments["num_classes"],
        "num_features": getattr(model, "num_features", None),
        "label_names": list(ids),
        "label_descriptions": dict(zip(ids, names, strict=True)),
        "model_args": options,
        "pretrained_cfg": {
            **kept,
            "tag": "paceline",
            "num_classes": arguments["num_classes"],
            "input_size": [arguments["in_chans"], *seen["size"]],
            "mean": seen["mean"],
            "std": seen["std"],
            "interpolation": seen["interpolation"],
            "crop_pct": seen["crop_pct"],
            "crop_mode": "center",
        },
    }


def write_config(folder: Path, model: nn.Module, metadata: dict[str, Any]) -> None:
    """Write config.json next to the weights, and check that timm makes the same model and preprocessing of them."""
    write_json(folder / CONFIG, config_of(model, metadata))
    import timm
    from timm.data import resolve_model_data_config

    name = metadata["model"]["name"]
    with torch.random.fork_rng(devices=[]):
        loaded = timm.create_model(f"local-dir:{folder}", pretrained=True)
    expected, found = model.state_dict(), loaded.state_dict()
    different = [key for key in expected.keys() | found.keys() if not _same(expected.get(key), found.get(key))]
    if different:
        message = (
            f"model.name={name}: timm loads different weights from the folder ({counted(len(different), 'tensor')}, "
            f"e.g. {min(different)}). Use --to FILE.safetensors."
        )
        raise UserError("export-differs", message, model=name, tensors=sorted(different))
    seen, config = metadata["preprocessing"], resolve_model_data_config(loaded)  # type: ignore[no-untyped-call]
    wanted = {
        "input_size": [metadata["model"]["in_chans"], *seen["size"]],
        "mean": seen["mean"],
        "std": seen["std"],
        "interpolation": seen["interpolation"],
        "crop_pct": seen["crop_pct"],
    }
    used = {key: list(value) if isinstance(value, tuple) else value for key, value in config.items()}
    if wrong := [key for key, value in wanted.items() if used[key] != value]:
        message = (
            f"model.name={name}: timm would use another {wrong[0]}, {config[wrong[0]]}. Use --to FILE.safetensors."
        )
        raise UserError("export-differs", message, model=name, keys=wrong)


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is not None and other is not None and torch.equal(one, other)
