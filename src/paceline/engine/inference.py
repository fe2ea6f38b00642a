"""Loads a trained model for use: in evaluation mode, with its preprocessing and its classes."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn.parameter import is_lazy

from paceline.checkpoint.verified import open_verified
from paceline.config.imports import load_imports
from paceline.config.io import recipe_from_tree
from paceline.data.load.crops import center_boxes
from paceline.data.pillow import plain
from paceline.engine.model import create_model, probe
from paceline.engine.saved import find_checkpoint
from paceline.engine.weights import load_weights
from paceline.models import factory


class Preprocess:
    """The transform of evaluation: center crop, resize, normalize. Maps a PIL image to a tensor (C, H, W)."""

    def __init__(self, settings: dict[str, Any]):
        self.size = (int(settings["size"][0]), int(settings["size"][1]))
        """Height and width."""
        self.crop_pct = float(settings["crop_pct"])
        self._mean, self._std = (torch.tensor(settings[name]).view(-1, 1, 1) for name in ("mean", "std"))

    def __repr__(self) -> str:
        mean, std = (", ".join(f"{value:.3g}" for value in values.flatten()) for values in (self._mean, self._std))
        height, width = self.size
        return f"Preprocess(size={height}x{width}, crop_pct={self.crop_pct:g}, mean=({mean}), std=({std}))"

    def __call__(self, image: Image.Image) -> torch.Tensor:
        height, width = self.size
        x, y, w, h, _ = center_boxes(np.array([image.size]), self.crop_pct, width, height)[0].tolist()
        part = plain(image).convert("L" if len(self._mean) == 1 else "RGB").crop((x, y, x + w, y + h))
        resized = part.resize((width, height), Image.Resampling.BILINEAR)
        pixels = torch.from_numpy(np.array(resized)).view(height, width, -1).permute(2, 0, 1)
        return (pixels / 255 - self._mean) / self._std


def load_model(path: Path, which: str = "best") -> nn.Module:
    """Return the model of a run or checkpoint in evaluation mode on the CPU.

    `which`: "best" or "last" checkpoint of a run. The model has two more attributes: `preprocess`, the transform of
    evaluation, and `classes`, the names of the classes in the order of the logits.
    """
    checkpoint, parts = open_verified(find_checkpoint(path, which))
    progress = parts["progress"]
    recipe = recipe_from_tree(progress["recipe"], str(checkpoint.folder))
    load_imports(recipe)
    shape = progress["model"]
    num_classes, channels = shape["num_classes"], shape["in_chans"]
    with torch.random.fork_rng(devices=[]):
        model = create_model(factory.untrained(recipe.model), recipe.seed, num_classes, channels)
        if any(map(is_lazy, model.parameters())):
            probe(model, recipe.model.name, num_classes, channels, tuple(progress["preprocessing"]["size"]))
    load_weights(model, parts["ema"] or parts["model"], str(checkpoint.folder))
    model.classes = tuple(name for _, name in progress["classes"])  # type: ignore[assignment]
    model.preprocess = Preprocess(progress["preprocessing"])  # type: ignore[assignment]
    return model.eval()
