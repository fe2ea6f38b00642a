"""Generated images that are as hard to compress as photographs."""

import io
from pathlib import Path

import numpy as np
from PIL import Image


def sample_image(width: int, height: int, seed: int = 0, mode: str = "RGB") -> Image.Image:
    """Return noise at every scale, as in photographs."""
    rng = np.random.default_rng(seed)
    total = np.zeros((height, width, 3))
    for scale in (1, 4, 16, 64):
        small = rng.normal(size=(height // scale + 2, width // scale + 2, 3)).astype(np.float32)
        layers = [Image.fromarray(small[..., channel]).resize((width, height), Image.BICUBIC) for channel in range(3)]
        total += np.stack([np.asarray(layer) for layer in layers], axis=2) * scale**0.6 * 6
    return Image.fromarray((128 + total).clip(0, 255).astype(np.uint8)).convert(mode)


def jpeg(image: Image.Image, **options: object) -> bytes:
    """Return the image as a JPEG of quality 90, or with other options of Pillow."""
    out = io.BytesIO()
    image.save(out, "jpeg", **({"quality": 90} | options))
    return out.getvalue()


def tree(root: Path, classes: int = 3, images: int = 4, splits: tuple[str, ...] = ("train", "val")) -> Path:
    """Write an image folder with `images` files per class and split. Returns its path."""
    for split in splits:
        for label in range(classes):
            folder = root / split / f"n{label:08d}"
            folder.mkdir(parents=True)
            for number in range(images):
                content = jpeg(sample_image(40 + 8 * label, 30 + 5 * number, 100 * label + number))
                (folder / f"{split}_{number}.JPEG").write_bytes(content)
    return root


def contents(root: Path) -> dict[str, bytes]:
    """Return the content of every file below a folder, by relative path."""
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


KINDS = [
    {"subsampling": "4:2:0"},
    {"subsampling": "4:2:2"},
    {"subsampling": "4:4:4", "quality": 100},
    {"subsampling": "4:2:0", "quality": 20, "optimize": True},
    {"subsampling": "4:2:0", "restart_marker_blocks": 3},
    {"mode": "L"},
]
"""Options of `jpeg` for all that the codec distinguishes; `mode` is that of the image."""
