"""Compares the native codec with libjpeg-turbo (through Pillow) and its paths with each other; corrupt input."""

import io
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sample_images import jpeg, sample_image

from paceline.data import codec

NATIVE = Path(codec.__file__).parent / "native"


def shard(*records: bytes) -> tuple[codec.Shards, np.ndarray]:
    lengths = [len(record) for record in records]
    offsets = np.cumsum([0, *lengths[:-1]])
    places = np.stack([np.zeros(len(records)), offsets, lengths], axis=1).astype(np.int64)
    return codec.Shards([b"".join(records) + bytes(codec.OVERRUN)]), places


def crop(
    record: bytes, box: tuple[int, ...], width: int, height: int, path: str = "", luma_only: bool = False
) -> np.ndarray:
    shards, places = shard(record)
    out = np.zeros((1, 3, height, width), np.uint8)
    statuses = codec.Decoder(shards, path).crop(places, np.array([box], np.int32), out, luma_only)
    assert statuses.tolist() == [0], codec.reason(int(statuses[0]))
    return out[0]


SHAPES = [(1, 1), (7, 9), (8, 8), (17, 31), (65, 200), (500, 375), (333, 500), (16, 640)]
KINDS = [
    {"subsampling": "4:2:0"},
    {"subsampling": "4:2:2"},
    {"subsampling": "4:4:4", "quality": 100},
    {"subsampling": "4:2:0", "quality": 20, "optimize": True},
    {"subsampling": "4:2:0", "restart_marker_blocks": 3},
    {"mode": "L"},
]


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


@pytest.mark.parametrize(("subsampling", "limit"), [("4:4:4", 0.28), ("4:2:0", 0.33), ("4:2:2", 0.33)])
def test_crops_match_antialiased_resizing_of_pillow(subsampling: str, limit: float) -> None:
    rng = random.Random(0)
    distances = []
    for number in range(12):
        content = jpeg(sample_image(500, 375, number), subsampling=subsampling)
        record, image = codec.pack(content), Image.open(io.BytesIO(content))
        for _ in range(4):
            width, height = rng.randint(60, 500), rng.randint(60, 375)
            x, y = rng.randint(0, 500 - width), rng.randint(0, 375 - height)
            expected = image.crop((x, y, x + width, y + height)).resize((224, 160), Image.BILINEAR)
            ours = crop(record, (x, y, width, height, 0), 224, 160).transpose(1, 2, 0).astype(int)
            distances.append(np.abs(ours - np.asarray(expected)).mean())
            mirrored = crop(record, (x, y, width, height, 1), 224, 160).transpose(1, 2, 0)
            assert np.array_equal(mirrored[:, ::-1], ours)
    assert np.mean(distances) < limit


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
            first, *others = (crop(record, box, *size, path) for path in codec.paths())
            assert all(np.array_equal(first, other) for other in others), (number, box, size)


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


def test_corrupt_input_never_reads_or_writes_out_of_bounds(tmp_path: Path) -> None:
    """Twenty thousand corrupt records and as many JPEGs, under the sanitizers."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    sources = [str(path) for path in NATIVE.glob("*.c") if path.name != "api.c"]
    flags = ["-std=c11", "-O1", "-g", "-D_GNU_SOURCE", "-ffp-contract=off", "-fsanitize=address,undefined"]
    flags += ["-fno-sanitize-recover=all", f"-I{NATIVE}", "-o", str(tmp_path / "fuzz")]
    command = [str(compiler), *flags, str(Path(__file__).parents[1] / "native" / "fuzz.c"), *sources, "-lm"]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if built.returncode and ("asan" in built.stderr or "unrecognized" in built.stderr or sys.platform != "linux"):
        pytest.skip(f"the compiler has no sanitizers (install libasan): {built.stderr[-200:]}")
    assert built.returncode == 0, built.stderr
    files = []
    for number, options in enumerate(KINDS):
        choice = dict(options)
        path = tmp_path / f"{number}.jpg"
        path.write_bytes(jpeg(sample_image(90 + 10 * number, 60, number, str(choice.pop("mode", "RGB"))), **choice))
        files.append(str(path))
    rounds = 20_000 // len(files) + 1
    answer = subprocess.run([str(tmp_path / "fuzz"), str(rounds), *files], capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr[-3000:]
    bad_records, bad_jpegs = map(int, answer.stdout.split())
    assert min(bad_records, bad_jpegs) > 1000  # enough of them were indeed corrupt
