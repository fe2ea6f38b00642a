"""The center crop of evaluation, and its use on a single image in a process without torch."""

from typing import Any

import numpy as np

from paceline.config.data import Interpolation
from paceline.data.images import decode


def center_boxes(sizes: np.ndarray, crop_pct: float, out_width: int, out_height: int) -> np.ndarray:
    """Return center crops with the aspect ratio of the output, `crop_pct` of the largest one per side."""
    width, height = sizes[:, 0].astype(np.int64), sizes[:, 1].astype(np.int64)
    scale = np.minimum(width / out_width, height / out_height) * crop_pct
    crop_width = np.clip(np.rint(out_width * scale), 1, width).astype(np.int64)
    crop_height = np.clip(np.rint(out_height * scale), 1, height).astype(np.int64)
    x, y = (width - crop_width) // 2, (height - crop_height) // 2
    return np.stack([x, y, crop_width, crop_height, np.zeros_like(x)], axis=1).astype(np.int32)


def decode_center(
    content: bytes, crop_pct: float, height: int, width: int, interpolation: Interpolation
) -> tuple[list[bytes], Any]:
    """Return the pixels of the center crop, uint8 (3, height, width), as bytes, for a decoder process."""
    pixels = np.empty((3, height, width), np.uint8)

    def choose(sizes: np.ndarray, _: np.ndarray) -> np.ndarray:
        return center_boxes(sizes, crop_pct, width, height)

    decode(content, choose, np.zeros(1, np.int64), pixels, interpolation)
    return [pixels.tobytes()], None
