"""Size of records, and difference of their crops to libjpeg-turbo decoding with Pillow resizing.

    python benchmarks/fidelity.py --images DIR_OR_TAR

For original files and for re-encoded sizes: bytes, ratio to the source JPEG, mean absolute difference (of 255 levels)
of one random crop per image at 224 px, bilinear and bicubic, and the number of images whose luma differs from libjpeg's
in any pixel.
"""

import argparse
import io
import tempfile
from pathlib import Path
from typing import get_args

import numpy as np
from loader_data import extracted
from PIL import Image

from paceline.config.data import Augment, Interpolation
from paceline.data import codec
from paceline.data.images import RESAMPLING
from paceline.data.load.crops import random_boxes
from paceline.data.pillow import open_image
from paceline.data.prepare.convert import Variant, encode


def crop(
    record: bytes,
    box: np.ndarray,
    width: int,
    height: int,
    luma_only: bool = False,
    interpolation: Interpolation = "bilinear",
) -> np.ndarray:
    out = np.empty((1, 3, height, width), np.uint8)
    shards = codec.Shards([record + bytes(codec.OVERRUN)])
    place = np.array([[0, 0, len(record)]])
    statuses = codec.Decoder(shards).crop(place, box.reshape(1, 5), out, luma_only, interpolation)
    assert not statuses.any(), codec.reason(int(statuses[0]))
    return out[0]


def luma_differs(record: bytes, jpeg: bytes) -> bool:
    image = Image.open(io.BytesIO(jpeg))
    image.draft("L", None)
    whole = np.array([0, 0, *image.size, 0], np.int32)
    return not np.array_equal(crop(record, whole, *image.size, luma_only=True)[0], np.asarray(image.convert("L")))


def distance(record: bytes, jpeg: bytes, number: int, interpolation: Interpolation) -> float:
    image = Image.open(io.BytesIO(jpeg)).convert("RGB")
    box = random_boxes(Augment(), seed=0, epoch=0)(np.array([image.size]), np.array([number]))[0]
    x, y, width, height, _ = (int(value) for value in box)
    expected = image.crop((x, y, x + width, y + height)).resize((224, 224), RESAMPLING[interpolation])
    ours = crop(record, box, 224, 224, interpolation=interpolation).transpose(1, 2, 0)
    return float(np.abs(ours.astype(int) - np.asarray(expected)).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, required=True, help="a folder or tar of JPEG images")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        files = [path.read_bytes() for path in extracted(options.images, Path(folder))]
    print(f"{len(files)} files, {sum(map(len, files)) / len(files) / 1e3:.1f} kB each")
    for variant in (Variant(), Variant(max_side=500), Variant(max_side=400)):
        jpegs = files
        if variant.name != "original":
            images = (open_image(content)[0] for content in files)
            jpegs = [encode(image, variant.size(*image.size), variant.quality) for image in images]
        records = [codec.pack(jpeg) for jpeg in jpegs]
        pairs = list(zip(records, jpegs, strict=True))
        size, ratio = sum(map(len, records)) / len(records), sum(map(len, records)) / sum(map(len, jpegs))
        bilinear, bicubic = (
            np.mean([distance(*pair, number, interpolation) for number, pair in enumerate(pairs)])
            for interpolation in get_args(Interpolation)
        )
        small = [pair for pair in pairs if max(codec.describe(pair[0])[:2]) <= 4096]
        differing = sum(luma_differs(*pair) for pair in small)
        print(
            f"  {variant.name:14}{size / 1e3:7.1f} kB{ratio:7.3f} of the JPEG   difference {bilinear:.3f} bilinear, "
            f"{bicubic:.3f} bicubic   luma differs in {differing} of {len(small)} images"
        )


if __name__ == "__main__":
    main()
