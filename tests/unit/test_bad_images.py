"""Irregular and unreadable images give the same pixels, or the same reason, wherever they are read."""

import io
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hostile import png_of
from PIL import Image, ImageOps
from sample_images import jpeg, sample_image, tree

from paceline.data import codec
from paceline.data.center import decode_center
from paceline.data.images import ImageFiles
from paceline.data.listing import list_images
from paceline.data.pillow import plain
from paceline.data.prepare.convert import Variant, convert
from paceline.engine.trained_model import Preprocess
from paceline.system.untrusted import Unreadable

WIDTH, HEIGHT = 48, 40
IMAGE = sample_image(WIDTH, HEIGHT)


def _encoded(kind: str, image: Image.Image = IMAGE, **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def _exif(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def _rotated(orientation: int) -> bytes:
    return jpeg(IMAGE, exif=_exif(orientation), quality=98, subsampling=0)


def _upright(content: bytes) -> Image.Image:
    return ImageOps.exif_transpose(Image.open(io.BytesIO(content)))


def _wide() -> Image.Image:
    """16 bits per pixel, over the whole range."""
    return Image.fromarray(np.linspace(0, 65535, WIDTH * HEIGHT).astype(np.uint16).reshape(HEIGHT, WIDTH))


def _dark() -> Image.Image:
    """16 bits per pixel, none above 250: nearly black."""
    return Image.fromarray((np.arange(WIDTH * HEIGHT) % 251).astype(np.uint16).reshape(HEIGHT, WIDTH))


def _big_endian() -> Image.Image:
    return Image.frombytes("I;16B", (WIDTH, HEIGHT), np.asarray(_wide()).astype(">u2").tobytes())


def _pgm(bits: int) -> bytes:
    values = (np.asarray(_wide()) >> (16 - bits)).astype(">u2")
    return f"P5 {WIDTH} {HEIGHT} {2**bits - 1}\n".encode() + values.tobytes()


def _gray(values: np.ndarray) -> Image.Image:
    return Image.fromarray(values.astype(np.uint8)).convert("RGB")


SCALED = _gray(np.linspace(0, 255, WIDTH * HEIGHT).reshape(HEIGHT, WIDTH))
SHOWN = {
    "cmyk": (jpeg(IMAGE.convert("CMYK"), quality=98), IMAGE, "CMYK"),
    "png named .jpg": (_encoded("png"), IMAGE, "a PNG file"),
    "16-bit png": (_encoded("png", _wide()), SCALED, "converted from mode I;16"),
    "16-bit tiff": (_encoded("tiff", _wide()), SCALED, "converted from mode I;16"),
    "big-endian tiff": (_encoded("tiff", _big_endian()), SCALED, "converted from mode I;16B"),
    "16-bit pgm": (_pgm(16), SCALED, "converted from mode I"),
    "12-bit pgm": (_pgm(12), SCALED, "converted from mode I"),
    "dark 16-bit png": (_encoded("png", _dark()), _gray(np.zeros((HEIGHT, WIDTH))), "converted from mode I;16"),
    "alpha": (_encoded("png", IMAGE.convert("RGBA")), IMAGE, "converted from mode RGBA"),
    "gray with alpha": (_encoded("png", IMAGE.convert("LA")), IMAGE.convert("L").convert("RGB"), "LA"),
    "animated gif": (
        _encoded("gif", IMAGE.convert("L"), save_all=True, append_images=[ImageOps.invert(IMAGE.convert("L"))]),
        IMAGE.convert("L").convert("RGB"),
        "the first of several frames",
    ),
    "animated webp": (
        _encoded("webp", IMAGE, save_all=True, append_images=[ImageOps.invert(IMAGE)], lossless=True),
        IMAGE,
        "the first of several frames",
    ),
    **{f"orientation {number}": (_rotated(number), _upright(_rotated(number)), "EXIF") for number in range(2, 9)},
    "rotated tiff": (_encoded("tiff", exif=_exif(6)), IMAGE.transpose(Image.Transpose.ROTATE_270), "a TIFF file"),
}


def _prepared(content: bytes, path: Path, size: tuple[int, int]) -> np.ndarray:
    (record,), _ = convert(content, [Variant()])
    found = codec.describe(record)[:2]
    assert found == size
    return np.asarray(Image.open(io.BytesIO(codec.unpack(record))).convert("RGB"))


def _trained(content: bytes, path: Path, size: tuple[int, int]) -> np.ndarray:
    width, height = size
    path.write_bytes(content)
    files = ImageFiles(path.parent, [(0, path)])
    assert tuple(files.sizes(np.array([0]))[0]) == size
    out = np.zeros((1, 3, height, width), np.uint8)
    assert files.read(np.array([0]), lambda sizes, _: np.array([[0, 0, *sizes[0], 0]], np.int32), out) == {}
    return out[0].transpose(1, 2, 0)


COLORS = {"mean": [0.0] * 3, "std": [1.0] * 3}


def _predicted(content: bytes, path: Path, size: tuple[int, int]) -> np.ndarray:
    width, height = size
    transform = Preprocess({"size": [height, width], "crop_pct": 1.0, "interpolation": "bilinear"} | COLORS)
    return (transform(Image.open(io.BytesIO(content))) * 255).round().byte().permute(1, 2, 0).numpy()


@pytest.mark.parametrize("read", [_prepared, _trained, _predicted])
@pytest.mark.parametrize("kind", SHOWN)
def test_pixels_are_those_that_are_shown(tmp_path: Path, kind: str, read: Callable) -> None:
    content, shown, _ = SHOWN[kind]
    pixels = read(content, tmp_path / "image.jpg", shown.size)
    difference = np.abs(pixels.astype(int) - np.asarray(shown).astype(int))
    assert difference.mean() < 6, difference.mean()  # a JPEG of noise; a mirrored one gives more than 20


@pytest.mark.parametrize("kind", SHOWN)
def test_what_was_converted_is_remarked(kind: str) -> None:
    content, _, expected = SHOWN[kind]
    assert expected in convert(content, [Variant()])[1]


def test_upright_jpegs_keep_their_coefficients() -> None:
    (record,), remark = convert(_rotated(1), [Variant()])
    assert remark == ""
    same, source = (np.asarray(Image.open(io.BytesIO(content))) for content in (codec.unpack(record), _rotated(1)))
    assert (same == source).all()


def test_corrupt_exif_data_is_ignored() -> None:
    content = _rotated(6)
    at = content.index(b"Exif") + 6
    broken = content[:at] + b"\xff" * 8 + content[at + 8 :]
    assert plain(Image.open(io.BytesIO(broken))).size == (WIDTH, HEIGHT)
    assert convert(broken, [Variant()])[1] == ""


UNREADABLE = {
    "zero bytes": (b"", "the file is empty"),
    "text": (b"<html>404 not found</html>", "not an image"),
    "only a header": (jpeg(IMAGE)[:300], "not an image"),
    "truncated jpeg": (jpeg(IMAGE, quality=98)[:-200], "truncated"),
    "truncated progressive jpeg": (jpeg(IMAGE, quality=98, progressive=True)[:-200], "truncated"),
    "truncated rotated jpeg": (_rotated(6)[:-200], "truncated"),
    "truncated png": (_encoded("png")[:2000], "not an image"),
    "32-bit tiff": (_encoded("tiff", Image.fromarray(np.full((9, 9), 1 << 20, np.int32))), "more than 16 bits"),
    "float tiff": (_encoded("tiff", Image.fromarray(np.ones((9, 9), np.float32))), "floating-point"),
    "decompression bomb": (png_of(50_000, 50_000), "pixels"),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_unreadable_images_have_the_same_reason_everywhere(tmp_path: Path, kind: str) -> None:
    content, reason = UNREADABLE[kind]
    for variant in (Variant(), Variant(max_side=32)):
        with pytest.raises(Unreadable, match=reason):
            convert(content, [variant])
    with pytest.raises(Unreadable, match=reason):  # as in predict and serve
        decode_center(content, 1.0, 8, 8, "bilinear")
    path = tmp_path / "image.jpg"
    path.write_bytes(content)
    out = np.zeros((1, 3, 8, 8), np.uint8)
    failures = ImageFiles(tmp_path, [(0, path)]).read(np.array([0]), lambda *_: pytest.fail("it was decoded"), out)
    assert reason in failures[0]


@pytest.mark.parametrize("ending", [b"\xff\xd9 trailing bytes", b"\xff", b""])
def test_a_baseline_jpeg_without_its_end_marker_is_complete(tmp_path: Path, ending: bytes) -> None:
    content = jpeg(IMAGE, quality=98).removesuffix(b"\xff\xd9") + ending
    for variant in (Variant(), Variant(max_side=32)):
        convert(content, [variant])
    pixels = _trained(content, tmp_path / "image.jpg", IMAGE.size)
    assert (pixels == _trained(jpeg(IMAGE, quality=98), tmp_path / "image.jpg", IMAGE.size)).all()


def test_files_without_an_image_extension_are_counted(tmp_path: Path, caplog) -> None:
    root = tree(tmp_path / "in", classes=2, images=1)
    for name in ("photo", "notes.txt", ".hidden"):
        (root / "train" / "n00000000" / name).write_bytes(jpeg(IMAGE))
    assert len(list_images(root).splits["train"]) == 2
    assert "ignored 2 files" in caplog.text
    assert "n00000000/notes.txt" in caplog.text


def test_a_list_may_name_images_without_an_extension(tmp_path: Path) -> None:
    for name in "abcd":
        (tmp_path / name).write_bytes(jpeg(IMAGE))
    (tmp_path / "list.csv").write_text("path,label,split\na,x,train\nb,y,train\nc,x,val\nd,y,val\n")
    assert len(list_images(tmp_path / "list.csv").splits["train"]) == 2


def test_broken_links_are_not_called_files_without_an_extension(tmp_path: Path, caplog) -> None:
    root = tree(tmp_path / "in", classes=2, images=1)
    (root / "train" / "n00000000" / "gone.jpg").symlink_to("nowhere.jpg")
    assert len(list_images(root).splits["train"]) == 2
    assert "ignored 1 file (broken links, or not regular files), e.g. n00000000/gone.jpg" in caplog.text
    assert "extension" not in caplog.text


def test_special_files_are_unreadable_instead_of_blocking(tmp_path: Path) -> None:
    path = tmp_path / "image.jpg"
    os.mkfifo(path)
    files = ImageFiles(tmp_path, [(0, path)])
    assert tuple(files.sizes(np.array([0]))[0]) == (1, 1)
    choose = lambda sizes, _: np.array([[0, 0, *sizes[0], 0]], np.int32)  # noqa: E731
    assert files.read(np.array([0]), choose, np.zeros((1, 3, 8, 8), np.uint8)) == {0: "not a regular file"}
