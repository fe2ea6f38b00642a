"""Opens a trained model for use: a run, a checkpoint, or an export in one of the formats of `paceline export`.

All have the same metadata: classes, preprocessing, model and recipe. A format of exports is one function, which maps
the file to a function that computes logits. Every rank calls it. No format but .pt2, which the user has to trust
explicitly, can run code from the file.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.checkpoint.tensors import open_files
from paceline.checkpoint.verified import open_checkpoint, open_verified
from paceline.config.imports import load_modules
from paceline.config.io import recipe_from_tree
from paceline.config.recipe import Recipe
from paceline.distributed.ddp import broadcast_model
from paceline.distributed.world import World
from paceline.engine import precision
from paceline.engine.evaluation.saved import find_checkpoint, is_export
from paceline.engine.kernels import choose_kernels
from paceline.engine.trained_model import architecture
from paceline.engine.weights import load_weights
from paceline.errors import UserError
from paceline.exports.metadata import import_onnx, read_metadata
from paceline.inference.classifier import Classifier, Forward, ModelMetadata
from paceline.models.folders import WEIGHTS_FILE


@dataclass(frozen=True)
class Usage:
    """How a model is used."""

    checkpoint: str = "best"
    """Of a run: the best or the last checkpoint."""
    precision: str = ""
    """Empty: that of the recipe; fp32 for exports."""
    tta: str = ""
    """Empty: that of the recipe."""
    crop_pct: float = 0.0
    """0: that of the model."""
    trust: bool = False
    """Open a .pt2 file, which can run code."""
    imports: tuple[str, ...] = ()
    """Modules that register the model."""
    temperature: float = 1.0
    """What logits are divided by before softmax."""


@dataclass(frozen=True)
class OpenedModel:
    """A model, and how its recipe reads data for evaluation."""

    classifier: Classifier
    variants: tuple[str, str]
    """Of prepared images: that for evaluation, empty for the default, and that of training."""
    rectangular: bool
    batch: int
    """Images per rank."""


@dataclass(frozen=True)
class _Source:
    """The file or folder of a model, with its metadata."""

    path: Path
    values: dict[str, Any]
    recipe: Recipe
    world: World
    trust: bool

    def model(self) -> nn.Module:
        """Return the model without its weights, on the device."""
        model = architecture(self.recipe.model, self.values, self.recipe.seed).eval()
        layout = torch.channels_last if self.recipe.channels_last else torch.contiguous_format
        return model.to(self.world.device, memory_format=layout)  # type: ignore[call-overload]


def open_model(path: Path, world: World, usage: Usage) -> OpenedModel:
    """Return a model for use on the device of this rank. A collective."""
    load_modules(usage.imports)
    # rank 0 decides, because the disks of other nodes may differ
    is_run = world.on_rank_zero(lambda: not is_export(path))
    load, is_graph = _EXPORTS.get("" if is_run else path.suffix.lower(), (_weights, False))
    if is_run:
        with world.long_timeout():  # a run in progress may replace its checkpoints, so rank 0 chooses one for all
            place, values = world.on_rank_zero(lambda: _verified(path, usage.checkpoint))
        path = Path(place)
    else:
        values = _same_metadata(path, world)
    recipe = recipe_from_tree(values["recipe"], str(path))
    load_modules(recipe.imports)
    choose_kernels(world.device, recipe.tf32)
    metadata = ModelMetadata.of(values, path)
    if usage.crop_pct:
        metadata = replace(metadata, crop_pct=usage.crop_pct)
    if is_graph and usage.precision not in ("", "auto", "fp32"):
        message = f"precision={usage.precision}: {path} computes in fp32. Use --precision fp32, or the run itself."
        raise UserError("precision-unsupported", message, precision=usage.precision, path=path)
    wanted = usage.precision or (recipe.precision if is_run else "fp32")
    resolved = "fp32" if is_graph else precision.resolve(wanted, world)
    source = _Source(path, values, recipe, world, usage.trust)
    forward = _checkpoint(source) if is_run else _load_together(load, source)
    phase, tta = recipe.all_phases()[-1], usage.tta or recipe.evaluate.tta
    trained = phase.variant or recipe.data.variant
    return OpenedModel(
        Classifier(str(path), metadata, forward, world.device, resolved, tta, usage.temperature),
        (recipe.evaluate.variant_for(trained), trained),
        phase.rectangular or recipe.evaluate.rectangular,
        recipe.evaluate.per_rank_batch,
    )


def _verified(path: Path, which: str) -> tuple[str, dict[str, Any]]:
    checkpoint, parts = open_verified(find_checkpoint(path, which))
    return str(checkpoint.folder), parts["progress"]


def _same_metadata(path: Path, world: World) -> dict[str, Any]:
    """Return the metadata of an export. Every rank reads its own file; UserError if they differ."""
    values = world.raise_together(lambda: read_metadata(path))
    file = path / WEIGHTS_FILE if path.is_dir() else path
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
    found = world.all_gather_object([digest, file.stat().st_size])
    if others := [rank for rank, other in enumerate(found) if other != found[0]]:
        message = f"{path} is not the same file on rank 0 and rank {others[0]}. Copy it to all nodes again."
        raise UserError("exports-differ", message, path=path, ranks=others)
    return values


def _load_together(load: Callable[[_Source], Forward], source: _Source) -> Forward:
    """Load an export on every rank; all raise the error of one."""
    with source.world.long_timeout():
        return source.world.raise_together(lambda: load(source))


def _checkpoint(source: _Source) -> Forward:
    """A checkpoint, which only rank 0 needs to see."""
    model, world = source.model(), source.world

    def load() -> None:
        _, parts = open_checkpoint(source.path)
        load_weights(model, parts["ema"] or parts["model"], str(source.path))

    with world.long_timeout():
        world.on_rank_zero(load)
        broadcast_model(model, world)
    return model


def _weights(source: _Source) -> Forward:
    """A .safetensors file, or a timm-hub folder with one."""
    path = source.path / WEIGHTS_FILE if source.path.is_dir() else source.path
    model = source.model()
    try:
        load_weights(model, open_files([path]), str(path))
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None
    return model


def _onnx(source: _Source) -> Forward:
    """An ONNX file, which ONNX Runtime computes on the CPU."""
    runtime = import_onnx("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # errors
    try:
        session = runtime.InferenceSession(source.path, options, providers=["CPUExecutionProvider"])
        (images,), (logits,) = session.get_inputs(), session.get_outputs()
    except Exception as error:  # ONNX Runtime has no common type of error
        raise _unreadable(source.path, error) from None

    def forward(batch: torch.Tensor) -> torch.Tensor:
        try:
            (found,) = session.run([logits.name], {images.name: batch.float().contiguous().cpu().numpy()})
        except Exception as error:
            raise _unreadable(source.path, error) from None
        return torch.from_numpy(found).to(batch.device)

    return forward


def _pt2(source: _Source) -> Forward:
    """A program of torch.export, which the user trusts."""
    if not source.trust:
        raise UserError(
            "export-not-trusted",
            f"{source.path}: torch.export.load can run code from a .pt2 file. If you trust its author, add --trust. "
            "Exports as .safetensors and .onnx need no trust.",
            path=source.path,
        )
    from torch.export import load  # imported late because it takes seconds

    try:
        return load(source.path).module().to(source.world.device)
    except Exception as error:  # torch has no common type of error
        raise _unreadable(source.path, error) from None


def _unreadable(path: Path, error: Exception) -> UserError:
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    return UserError("model-unreadable", f"{path} cannot be used ({reason}). Export the model again.", path=path)


# format by suffix, and whether it is a graph, which computes in one precision
_EXPORTS: dict[str, tuple[Callable[[_Source], Forward], bool]] = {
    ".safetensors": (_weights, False),
    ".onnx": (_onnx, True),
    ".pt2": (_pt2, True),
}
