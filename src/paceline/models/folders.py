"""Model folders of timm and the Hugging Face Hub: config.json beside the weights."""

import json
from pathlib import Path
from typing import Any

from paceline.errors import UserError

LOCAL = "local-dir:"
"""Prefix of model names that are folders."""
CONFIG = "config.json"
WEIGHTS_FILE = "model.safetensors"
EXPORT_SUFFIXES = (".safetensors", ".onnx", ".pt2")
_MAX_BYTES = 16 << 20  # with the names of many classes


def read_config(name: str) -> dict[str, Any]:
    """Return config.json of a model named local-dir:FOLDER. Raises if it does not describe a timm model."""
    import timm

    folder = Path(name.removeprefix(LOCAL))
    if not (folder / CONFIG).is_file():
        message = f"model.name={name}: {folder / CONFIG} does not exist. Give a folder that timm or"
        raise UserError("model-folder-invalid", f"{message} `paceline export` wrote, with {CONFIG}.", path=folder)
    config = read_json(folder / CONFIG)
    architecture = config.get("architecture")
    if not isinstance(architecture, str) or not timm.is_model(architecture):
        message = f"model.name={name}: `architecture` in {folder / CONFIG} is {architecture!r:.60}, not a timm model."
        raise UserError("model-folder-invalid", f"{message} Set model.name to one.", path=folder)
    if not isinstance(config.get("pretrained_cfg", {}), dict):
        message = f"model.name={name}: `pretrained_cfg` in {folder / CONFIG} is not a JSON object."
        raise UserError("model-folder-invalid", f"{message} Set model.name to a timm model.", path=folder)
    return config


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError("larger than 16 MB")
        found = json.loads(path.read_text("utf-8"))
        if not isinstance(found, dict):
            raise ValueError("not a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:120]
        message = f"the config of the model folder is unreadable: {path} ({reason}). Copy it again."
        raise UserError("model-folder-invalid", message, path=path) from None
    return found
