"""Exports a checkpoint: chooses the format, checks the target, writes it under another name, and renames it."""

import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import nn

from paceline.checkpoint import store
from paceline.checkpoint.tensors import materialize
from paceline.checkpoint.verified import open_verified
from paceline.config.io import recipe_from_tree
from paceline.engine.trained_model import load_model
from paceline.errors import UserError
from paceline.exports import comparison
from paceline.exports.card import model_card
from paceline.exports.graphs import onnx_bytes, torch_export_bytes
from paceline.exports.metadata import KEY, metadata_of
from paceline.exports.timm_hub import CARD, FILES, check_is_timm, write_config
from paceline.models.folders import WEIGHTS_FILE
from paceline.system.files import replacing, sync_tree, write_text
from paceline.track.records import RunFolder

SUFFIXES = {"safetensors": ".safetensors", "onnx": ".onnx", "torch-export": ".pt2", "timm-hub": "", "card": ".md"}
"""The formats, with the suffixes of their files; timm-hub is a folder."""
_GRAPHS = {"onnx": onnx_bytes, "torch-export": torch_export_bytes}


@dataclass(frozen=True)
class Exporter:
    """Exports one checkpoint."""

    folder: Path
    """The checkpoint."""
    raw: bool = False
    images: Path | None = None
    license: str = ""

    @cached_property
    def _opened(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The metadata and the parts of the verified checkpoint."""
        checkpoint, parts = open_verified(self.folder)
        return metadata_of(checkpoint, parts, self.raw), parts

    @cached_property
    def _model(self) -> nn.Module:
        return load_model(self.folder, raw=self.raw)

    @property
    def metadata(self) -> dict[str, Any]:
        return self._opened[0]

    def write(self, target: Path, format: str, force: bool = False) -> str:
        """Write a file or folder and return a summary."""
        check_target(target, format, force)
        metadata, kind = self.metadata, "EMA weights" if self.metadata["weights"] == "ema" else "weights"
        about = f"{kind} of step {metadata['step']} from {self.folder}"
        if format == "timm-hub":
            with _replaced_folder(target) as place:
                self.write_folder(place)
            call = f"timm.create_model('local-dir:{target}', pretrained=True)"
            return f"{target}: timm folder with {about}; load it with {call}"
        if format == "card":
            write_text(target, self.card())
            return f"{target}: model card of step {metadata['step']} from {self.folder}"
        if format == "safetensors":
            return f"{target}: {about} ({self._write_weights(target)} tensors)"
        content, done = _GRAPHS[format](self._model, metadata, self._images)
        with replacing(target) as file:
            file.write(content)
        return f"{target}: {about}\n{comparison.summary(done['comparison'])}"

    def write_folder(self, place: Path, name: str = "") -> None:
        """Write the files of a timm-hub folder. `name`: that for timm.create_model, in the model card."""
        check_is_timm(self.metadata["model"]["name"])
        self._write_weights(place / WEIGHTS_FILE)
        write_config(place, self._model, self.metadata)
        write_text(place / CARD, self.card(name, front_matter=True))

    def card(self, name: str = "", front_matter: bool = False) -> str:
        """Return the model card, if needed with the front matter of the Hub."""
        run = RunFolder.of_checkpoint(self.folder)
        is_best = run is not None and self._is_best(run)
        return model_card(self.metadata, run, self.license, name, front_matter, is_best)

    def _is_best(self, run: RunFolder) -> bool:
        recipe = recipe_from_tree(self._opened[1]["progress"]["recipe"], str(self.folder))
        best = store.best(run.checkpoints, recipe.checkpoint.best)
        return best is not None and best.step == self.metadata["step"]

    def _write_weights(self, target: Path) -> int:
        """Write the weights and return the number of tensors."""
        weights = materialize(self._opened[1][self.metadata["weights"]])
        with replacing(target) as file:
            file.write(safetensors.torch.save(weights, {"format": "pt", KEY: json.dumps(self.metadata)}))
        return len(weights)

    def _images(self) -> comparison.RealImages:
        if self.images:
            return comparison.images_at(self.images, self._model.preprocess)  # type: ignore[arg-type]
        return comparison.validation_images(self._opened[1]["progress"], str(self.folder))


def choose_format(target: Path, format: str = "") -> str:
    """Return the format that the user asks for, or that of the suffix. Refuses a suffix of another format."""
    known = ", ".join(SUFFIXES)
    if format and format not in SUFFIXES:
        raise UserError("unknown-format", f"format {format!r} is unknown. Choose one of {known}.", format=format)
    by_suffix = next((name for name, suffix in SUFFIXES.items() if suffix == target.suffix), "")
    if not format and not by_suffix:
        if target.is_dir():
            return "timm-hub"
        suffixes = ", ".join(filter(None, SUFFIXES.values()))
        message = f"{target}: no format has the suffix {target.suffix}. Use {suffixes} or a folder, or give --format."
        raise UserError("wrong-suffix", message, path=target)
    if format and format != "timm-hub" and target.suffix != SUFFIXES[format]:
        message = f"{target}: files of format {format} end in {SUFFIXES[format]}. Choose such a name."
        raise UserError("wrong-suffix", message, path=target, format=format)
    if format == "timm-hub" and by_suffix not in ("", "timm-hub"):
        message = f"{target}: timm-hub is a folder, but {target.suffix} is the suffix of {by_suffix}. Choose one."
        raise UserError("wrong-suffix", message, path=target, format=format)
    return format or by_suffix


def check_target(target: Path, format: str, force: bool) -> None:
    """Refuse a target that cannot be written, exists, or is not what `paceline export` wrote."""
    parent = target.absolute().parent
    if not parent.is_dir():
        message = f"{target} cannot be written: the folder {parent} does not exist. Create it first."
        raise UserError("output-folder-not-found", message, path=parent)
    if not os.access(parent, os.W_OK):
        message = f"{target} cannot be written: the folder {parent} is not writable. Choose another, or chmod it."
        raise UserError("output-not-writable", message, path=parent)
    if not os.path.lexists(target):
        return
    if format != "timm-hub" and target.is_dir():
        name = target / f"model{SUFFIXES[format]}"
        message = f"{target} is a folder, but {format} is one file. Give a file, e.g. {name}."
        raise UserError("output-is-a-folder", message, path=target)
    if format == "timm-hub":
        others = [path.name for path in target.iterdir() if path.name not in FILES] if target.is_dir() else [""]
        if others:
            message = f"{target} exists and is not a timm-hub folder{f' ({others[0]})' if others[0] else ''}. "
            raise UserError("output-has-other-data", f"{message}Choose another name.", path=target)
        if not any(target.iterdir()):
            return
    if not force:
        message = f"{target} exists. Give --force to replace it, or choose another name."
        raise UserError("output-exists", message, path=target)


@contextmanager
def _replaced_folder(target: Path) -> Iterator[Path]:
    """Yield a new folder, which replaces the target when everything is on disk."""
    target = target.resolve()  # a link to a folder stays one
    new = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    new.mkdir()
    try:
        yield new
        sync_tree(new)
        old = target.with_name(f"{new.name}.old")
        if target.exists():
            target.rename(old)
        try:
            new.rename(target)
        except OSError:
            if old.exists():
                old.rename(target)
            raise
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(new, ignore_errors=True)
