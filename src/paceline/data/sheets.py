"""Contact sheets of labeled images."""

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from paceline.system.files import replacing


def contact_sheet(images: Sequence[np.ndarray], labels: Sequence[str], columns: int, side: int) -> Image.Image:
    """Return one image with all images, uint8 (height, width, channels), in rows with labels below."""
    line, rows = 14, -(-len(images) // columns)
    sheet = Image.new("RGB", (columns * side, rows * (side + line)), "white")
    draw = ImageDraw.Draw(sheet)
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        x, y = number % columns * side, number // columns * (side + line)
        tile = Image.fromarray(image.squeeze(-1) if image.shape[-1] == 1 else image).convert("RGB")
        # keep the pixels of small images visible
        resampling = Image.Resampling.BILINEAR if max(tile.size) >= side else Image.Resampling.NEAREST
        sheet.paste(tile.resize((side - 2, side - 2), resampling), (x, y))
        draw.text((x + 2, y + side), label[: side // 6], fill="black")
    return sheet


def write_png(image: Image.Image, path: Path) -> None:
    """Write an image as PNG."""
    content = io.BytesIO()  # Pillow would hide the error of a full disk if it wrote to the file itself
    image.save(content, "png")
    with replacing(path) as file:
        file.write(content.getbuffer())
