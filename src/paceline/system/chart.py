"""Small line charts and contact sheets of labeled images, drawn with Pillow."""

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from paceline.system.files import replacing

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 900, 420, 90, 30, 50, 50
_COLORS = ("#1f5fa8", "#c2571a", "#2e8540", "#7a3e9d")
_BLOCKS = " ▁▂▃▄▅▆▇█"


def line_chart(path: Path, title: str, x_label: str, lines: dict[str, Sequence[tuple[float, float]]]) -> None:
    """Write a chart of named lines, with one y axis from zero."""
    points = [point for line in lines.values() for point in line]
    low, high = min(x for x, _ in points), max(x for x, _ in points)
    top = max(y for _, y in points) or 1.0
    image = Image.new("RGB", (_WIDTH, _HEIGHT), "white")
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(14)
    inner_width, inner_height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        fraction = (x - low) / (high - low) if high > low else 0.5
        return _LEFT + fraction * inner_width, _TOP + inner_height * (1 - y / top)

    draw.text((_LEFT, 14), title, fill="black", font=font)
    draw.text((_LEFT + inner_width / 2, _HEIGHT - 26), x_label, fill="black", font=font)
    for fifth in range(6):
        y, x = top * fifth / 5, low + (high - low) * fifth / 5
        draw.line([place(low, y), place(high, y)], fill="#dddddd")
        draw.text((8, place(low, y)[1] - 8), f"{y:.4g}", fill="black", font=font)
        draw.text((place(x, 0)[0] - 10, _HEIGHT - 46), f"{x:.4g}", fill="black", font=font)
    for number, (name, line) in enumerate(lines.items()):
        color = _COLORS[number % len(_COLORS)]
        draw.line([place(x, y) for x, y in line], fill=color, width=3)
        for x, y in line if len(line) < 40 else ():
            center = place(x, y)
            draw.ellipse([center[0] - 3, center[1] - 3, center[0] + 3, center[1] + 3], fill=color)
        draw.text((_WIDTH - 300, 14 + 18 * number), name, fill=color, font=font)
    write_png(image, path)


def write_png(image: Image.Image, path: Path) -> None:
    """Write an image as PNG."""
    content = io.BytesIO()  # Pillow would hide the error of a full disk if it wrote to the file itself
    image.save(content, "png")
    with replacing(path) as file:
        file.write(content.getbuffer())


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


def sparkline(values: Sequence[float], width: int = 72) -> str:
    """Return a curve as one line of text."""
    top = max(values) or 1.0
    columns = min(width, len(values))
    chosen = [values[column * len(values) // columns] for column in range(columns)]
    return "".join(_BLOCKS[round(value / top * (len(_BLOCKS) - 1))] for value in chosen)
