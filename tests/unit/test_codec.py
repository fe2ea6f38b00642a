"""Compares the native codec with libjpeg-turbo (through Pillow) and its paths with each other; corrupt input."""

import io
import random

import numpy as np
import pytest
from PIL import Image
from sample_images import KINDS, jpeg, sample_image

from paceline.config.data import Interpolation
from paceline.data import codec
from paceline.data.images import RESAMPLING


def shard(*records: bytes) -> tuple[codec.Shards, np.ndarray]:
    lengths = [len(record) for record in records]
    offsets = np.cumsum([0, *lengths[:-1]])
    places = np.stack([np.zeros(len(records)), offsets, lengths], axis=1).astype(np.int64)
    return codec.Shards([b"".join(records) + bytes(codec.OVERRUN)]), places


def crop(
    record: bytes,
    box: tuple[int, ...],
    width: int,
    height: int,
    path: str = "",
    luma_only: bool = False,
    interpolation: Interpolation = "bilinear",
) -> np.ndarray:
    shards, places = shard(record)
    out = np.zeros((1, 3, height, width), np.uint8)
    statuses = codec.Decoder(shards, path).crop(places, np.array([box], np.int32), out, luma_only, interpolation)
    assert statuses.tolist() == [0], codec.reason(int(statuses[0]))
    return out[0]


SHAPES = [(1, 1), (7, 9), (8, 8), (17, 31), (65, 200), (500, 375), (333, 500), (16, 640)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: " ".join(map(str, kind.values())))
def test_luma_equals_libjpeg_and_export_is_exact(kind: dict[str, object]) -> None:
    options = dict(kind)
    mode = str(options.pop("mode", "RGB"))
    for number, (width, height) in enumerate(SHAPES):
        content = jpeg(sample_image(width, height, number, mode), **options)
        record = codec.pack(content)
        assert codec.describe(record) == (width, height, 1 if mode == "L" else 3)
        image = Image.open(io.BytesIO(content))
        image.draft("L", None)
        expected = np.asarray(image.convert("L"))
        for path in codec.paths():
            assert np.array_equal(crop(record, (0, 0, width, height, 0), width, height, path, True)[0], expected)
        exported = codec.unpack(record)
        assert codec.pack(exported) == record
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(exported))), np.asarray(Image.open(io.BytesIO(content))))


BOTH: tuple[Interpolation, ...] = ("bilinear", "bicubic")


@pytest.mark.parametrize("interpolation", BOTH)
@pytest.mark.parametrize(("subsampling", "limit"), [("4:4:4", 0.28), ("4:2:0", 0.33), ("4:2:2", 0.33)])
def test_crops_match_antialiased_resizing_of_pillow(
    subsampling: str, limit: float, interpolation: Interpolation
) -> None:
    rng = random.Random(0)
    distances = []
    for number in range(12):
        content = jpeg(sample_image(500, 375, number), subsampling=subsampling)
        record, image = codec.pack(content), Image.open(io.BytesIO(content))
        for _ in range(4):
            width, height = rng.randint(60, 500), rng.randint(60, 375)
            x, y = rng.randint(0, 500 - width), rng.randint(0, 375 - height)
            expected = image.crop((x, y, x + width, y + height)).resize((224, 160), RESAMPLING[interpolation])
            box = (x, y, width, height)
            ours = crop(record, (*box, 0), 224, 160, interpolation=interpolation).transpose(1, 2, 0).astype(int)
            distances.append(np.abs(ours - np.asarray(expected)).mean())
            mirrored = crop(record, (*box, 1), 224, 160, interpolation=interpolation).transpose(1, 2, 0)
            assert np.array_equal(mirrored[:, ::-1], ours)
    assert np.mean(distances) < limit


def _resized(pixels: np.ndarray, size: tuple[int, int], interpolation: Interpolation) -> tuple[np.ndarray, np.ndarray]:
    """Return the codec's and Pillow's result for a gray image, whose samples are equal before they are resized."""
    content = jpeg(Image.fromarray(pixels), quality=100)
    image, record = Image.open(io.BytesIO(content)), codec.pack(content)
    outputs = [crop(record, (0, 0, *image.size, 0), *size, path, interpolation=interpolation) for path in codec.paths()]
    assert all(np.array_equal(outputs[0], other) for other in outputs)
    # Pillow 13 may resize vertically first; the order matters where values are clamped in between
    halfway = image.resize((size[0], image.height), RESAMPLING[interpolation])
    return outputs[0][0].astype(int), np.asarray(halfway.resize(size, RESAMPLING[interpolation])).astype(int)


SIZES = [(1, 1), (3, 5), (37, 53), (96, 64), (97, 65), (192, 128), (333, 501)]


@pytest.mark.parametrize("interpolation", BOTH)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_gray_images_are_enlarged_and_reduced_as_by_pillow(size: tuple[int, int], interpolation: Interpolation) -> None:
    """Pillow rounds to 8 bits between its two passes, and the codec does not, so pixels differ by one or two levels."""
    ours, expected = _resized(np.asarray(sample_image(96, 64, 3, "L")), size, interpolation)
    assert np.abs(ours - expected).max() <= 2
    assert np.abs(ours - expected).mean() < 0.3
    if size == (96, 64):
        assert np.array_equal(ours, expected)


@pytest.mark.parametrize("size", [(24, 20), (50, 41), (160, 130)], ids=str)
def test_bicubic_overshoot_at_black_and_white_edges_is_clamped(size: tuple[int, int]) -> None:
    """Values beyond 0-255 would wrap around in 16 bits; these are stripes and checkers with the strongest overshoot."""
    rng = np.random.default_rng(0)
    for cells in (np.eye(8), rng.integers(0, 2, (9, 7)), np.indices((10, 10)).sum(0) % 2):
        pixels = np.kron(cells, np.ones((8, 8))).astype(np.uint8) * 255
        ours, expected = _resized(pixels, size, "bicubic")
        assert np.abs(ours - expected).max() <= 3
        assert (ours.min(), ours.max()) == (0, 255)


@pytest.mark.skipif(len(codec.paths()) < 2, reason="this CPU has one path only; one with AVX2 has two")
def test_all_paths_return_the_same_bytes() -> None:
    rng = random.Random(1)
    for number in range(60):
        width, height = rng.randint(1, 300), rng.randint(1, 300)
        options = {
            "subsampling": rng.choice(["4:4:4", "4:2:2", "4:2:0"]),
            "quality": rng.choice([5, 50, 90, 100]),
        }
        record = codec.pack(jpeg(sample_image(width, height, number, rng.choice(["RGB", "RGB", "L"])), **options))
        for _ in range(10):
            w, h = rng.randint(1, width), rng.randint(1, height)
            box = (rng.randint(0, width - w), rng.randint(0, height - h), w, h, rng.randint(0, 1))
            size = (rng.randint(1, 260), rng.randint(1, 260))
            for interpolation in BOTH:
                first, *others = (crop(record, box, *size, path, False, interpolation) for path in codec.paths())
                assert all(np.array_equal(first, other) for other in others), (number, box, size, interpolation)


def test_flipped_bit_in_a_record_is_detected_200_of_200() -> None:
    record = codec.pack(jpeg(sample_image(120, 90)))
    rng = random.Random(2)
    for path in codec.paths():
        codec.describe(record, path)
        for _ in range(200):
            changed = bytearray(record)
            place = rng.randrange(len(record) * 8)
            changed[place // 8] ^= 1 << place % 8
            with pytest.raises(codec.CodecError):
                codec.describe(bytes(changed), path)


def test_corrupt_record_is_reported_and_its_neighbors_are_decoded() -> None:
    records = [codec.pack(jpeg(sample_image(64, 64, number))) for number in range(3)]
    records[1] = records[1][:-1] + bytes([records[1][-1] ^ 1])
    shards, places = shard(*records)
    out = np.zeros((3, 3, 32, 32), np.uint8)
    boxes = np.array([[0, 0, 64, 64, 0]] * 3, np.int32)
    statuses = codec.Decoder(shards).crop(places, boxes, out)
    assert [codec.reason(int(status)) for status in statuses] == [
        "valid",
        "the record does not match its checksum",
        "valid",
    ]
    assert out[0].any()
    assert out[2].any()
    wrong = [[1, 0, 10], [0, -1, 10], [0, 1 << 40, 10], [0, 0, 1 << 40], [-1, 0, 10]]
    statuses = codec.Decoder(shards).crop(
        np.array(wrong, np.int64), np.repeat(boxes[:1], 5, 0), np.zeros((5, 3, 8, 8), np.uint8)
    )
    assert set(statuses.tolist()) == {int(statuses[0])} != {0}
    outside = np.array([[60, 0, 5, 5, 0], [0, 0, 0, 5, 0], [-1, 0, 5, 5, 0]], np.int32)
    statuses = codec.Decoder(shards).crop(places[[0, 0, 0]], outside, np.zeros((3, 3, 8, 8), np.uint8))
    assert "not inside the image" in codec.reason(int(statuses[0]))
    assert statuses.all()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not a JPEG"),
        (b"\x89PNG\r\n\x1a\n", "not a JPEG"),
        (jpeg(sample_image(64, 64))[:-300], "the JPEG ends early"),
        (jpeg(sample_image(64, 64), progressive=True), "progressive"),
        (jpeg(sample_image(64, 64).convert("CMYK")), "neither gray nor three"),
        (jpeg(sample_image(64, 64), keep_rgb=True), "RGB instead of YCbCr"),
    ],
)
def test_other_files_than_baseline_jpegs_are_rejected(content: bytes, reason: str) -> None:
    with pytest.raises(codec.CodecError, match=reason):
        codec.pack(content)
