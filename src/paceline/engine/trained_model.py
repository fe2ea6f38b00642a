"""Loads a trained model for use: in evaluation mode, with its preprocessing and its classes."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn.parameter import is_lazy

from paceline.checkpoint.verified import open_verified
from paceline.config.data import Interpolation
from paceline.config.imports import load_imports
from paceline.config.io import recipe_from_tree
from paceline.config.model import Model
from paceline.data.center import center_boxes
from paceline.data.images import RESAMPLING
from paceline.data.pillow import plain
from paceline.engine.evaluation.saved import find_checkpoint
from paceline.engine.model import create_model, probe
from paceline.engine.weights import load_weights
from paceline.models import factory


class Preprocess:
    """The transform of evaluation: center crop, resize, normalize. Maps a PIL image to a tensor (C, H, W)."""

    def __init__(self, settings: dict[str, Any]):
        self.size = (int(settings["size"][0]), int(settings["size"][1]))
        """Height and width."""
        self.crop_pct = float(settings["crop_pct"])
        self.interpolation: Interpolation = settings["interpolation"]
        self._mean, self._std = (torch.tensor(settings[name]).view(-1, 1, 1) for name in ("mean", "std"))

    def __repr__(self) -> str:
        mean, std = (", ".join(f"{value:.3g}" for value in values.flatten()) for values in (self._mean, self._std))
        height, width = self.size
        crop = f"size={height}x{width}, crop_pct={self.crop_pct:g}, interpolation={self.interpolation}"
        return f"Preprocess({crop}, mean=({mean}), std=({std}))"

    def __call__(self, image: Image.Image) -> torch.Tensor:
        height, width = self.size
        image = plain(image)
        x, y, w, h, _ = center_boxes(np.array([image.size]), self.crop_pct, width, height)[0].tolist()
        part = image.convert("L" if len(self._mean) == 1 else "RGB").crop((x, y, x + w, y + h))
        resized = part.resize((width, height), RESAMPLING[self.interpolation])
        pixels = torch.from_numpy(np.array(resized)).view(height, width, -1).permute(2, 0, 1)
        return (pixels / 255 - self._mean) / self._std


def load_model(path: Path, which: str = "best", raw: bool = False) -> nn.Module:
    """Return the model of a run or checkpoint in evaluation mode on the CPU.

    `which`: "best" or "last" checkpoint of a run. `raw`: the trained weights, even if there is a moving average (EMA).
    The model has two more attributes: `preprocess`, the transform of evaluation, and `classes`, the names of the
    classes in the order of the logits.
    """
    checkpoint, parts = open_verified(find_checkpoint(path, which))
    progress = parts["progress"]
    recipe = recipe_from_tree(progress["recipe"], str(checkpoint.folder))
    load_imports(recipe)
    model = architecture(recipe.model, progress, recipe.seed)
    load_weights(model, parts["model"] if raw else parts["ema"] or parts["model"], str(checkpoint.folder))
    model.classes = tuple(name for _, name in progress["classes"])  # type: ignore[assignment]
    model.preprocess = Preprocess(progress["preprocessing"])  # type: ignore[assignment]
    return model.eval()


def architecture(config: Model, metadata: dict[str, Any], seed: int = 0) -> nn.Module:
    """Return a model without its trained weights. `metadata` is that of a checkpoint or an export."""
    num_classes, channels = metadata["model"]["num_classes"], metadata["model"]["in_chans"]
    with torch.random.fork_rng(devices=[]):
        model = create_model(factory.untrained(config, metadata["model"]), seed, num_classes, channels)
        if any(map(is_lazy, model.parameters())):
            probe(model, config.name, num_classes, channels, tuple(metadata["preprocessing"]["size"]))
    return model
