"""Converts an image file to one record per variant: keeps JPEG coefficients if possible, else decodes with Pillow."""

import io
from dataclasses import dataclass

from PIL import Image

from paceline.data import codec
from paceline.data.pillow import MAX_PIXELS, is_rotated_jpeg, open_image
from paceline.system.untrusted import Unreadable

_KEPT_QUALITY = 95  # of images that are re-encoded at their original size


@dataclass(frozen=True)
class Variant:
    """One size of all images: the original, or limited to a number of pixels on the longest or shortest side."""

    max_side: int = 0
    short_side: int = 0
    quality: int = 90

    @property
    def name(self) -> str:
        if self.max_side:
            return f"max-{self.max_side}-q{self.quality}"
        return f"short-{self.short_side}-q{self.quality}" if self.short_side else "original"

    def size(self, width: int, height: int) -> tuple[int, int]:
        side, limit = (max(width, height), self.max_side) if self.max_side else (min(width, height), self.short_side)
        if not limit or side <= limit:
            return width, height
        return max(1, round(width * limit / side)), max(1, round(height * limit / side))


def convert_as(content: bytes, variants: list[dict[str, int]]) -> tuple[list[bytes], str]:
    """Call convert() with variants from JSON, in a decoder process. It raises Pillow's limit of that process."""
    Image.MAX_IMAGE_PIXELS = MAX_PIXELS // 2  # Pillow refuses images with more than twice as many
    return convert(content, [Variant(**fields) for fields in variants])


def convert(content: bytes, variants: list[Variant]) -> tuple[list[bytes], str]:
    """Return one record per variant, and a remark if the file is not a plain baseline JPEG."""
    records: list[bytes] = []
    image: Image.Image | None = None
    remark, rotated = "", is_rotated_jpeg(content)
    for variant in variants:
        if variant.name == "original" and not rotated:
            try:
                records.append(codec.pack(content))
                continue
            except codec.CodecError as error:
                remark = f"{error}; re-encoded as a baseline JPEG of quality {_KEPT_QUALITY}"
        if image is None:
            image, problem = open_image(content)
            remark = problem or remark
        quality = _KEPT_QUALITY if variant.name == "original" else variant.quality
        try:
            records.append(codec.pack(encode(image, variant.size(*image.size), quality)))
        except codec.CodecError as error:
            raise Unreadable(f"{image.width} x {image.height} pixels: {error}") from None
    return records, remark


def encode(image: Image.Image, size: tuple[int, int], quality: int) -> bytes:
    """Return a baseline JPEG of the given size."""
    if size != image.size:
        image = image.resize(size, Image.Resampling.LANCZOS)
    if max(size) > 65500:
        raise Unreadable(f"{size[0]} x {size[1]} pixels are too many for a JPEG")
    out = io.BytesIO()
    image.save(
        out, "jpeg", quality=quality, comment=b""
    )  # Pillow would copy the original comment, which may be too long
    return out.getvalue()
