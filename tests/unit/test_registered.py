"""Registered datasets: which images and labels they may return, and what happens if they return something else."""

import numpy as np
import pytest
import torch
from PIL import Image

from paceline.data.images import ImageFiles
from paceline.engine.inference import Preprocess

WIDE = {
    "I;16": np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8),
    "I": np.linspace(0, 65535, 64).astype(np.int32).reshape(8, 8),
    "F": np.linspace(0, 1, 64).astype(np.float32).reshape(8, 8),
}
"""Images of more than 8 bits, by their mode in Pillow: ramps from black to white."""
RAMP = np.linspace(0, 255, 64).reshape(8, 8)


def _whole(sizes: np.ndarray, _keys: np.ndarray) -> np.ndarray:
    return np.array([[0, 0, width, height, 0] for width, height in sizes])


@pytest.mark.parametrize("mode", WIDE)
def test_preprocess_reads_wide_images_like_image_folders(tmp_path, mode: str) -> None:
    image = Image.fromarray(WIDE[mode])
    assert image.mode == mode
    image.save(path := tmp_path / "image.tiff")
    out = np.zeros((1, 3, 8, 8), np.uint8)
    assert not ImageFiles(tmp_path, [(0, path)]).read(np.array([0]), _whole, out)
    ready = Preprocess({"size": (8, 8), "crop_pct": 1.0, "mean": [0.0] * 3, "std": [1.0] * 3})(image)
    assert torch.equal((ready * 255).round().to(torch.uint8), torch.from_numpy(out[0]))
    assert abs(out[0] - RAMP).max() <= 1
