"""Thumbnails from DC coefficients, perceptual hashes, and the search for similar ones."""

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageEnhance
from sample_images import jpeg, sample_image

from paceline.cli.data import MAX_DISTANCE as OFFERED_DISTANCE
from paceline.data import codec, hashing
from paceline.data.hashing import HASH_BITS, MAX_DISTANCE, correlation, distance, hashes, neighbors


def test_the_command_offers_the_distances_that_are_searched() -> None:
    assert OFFERED_DISTANCE == MAX_DISTANCE


def _thumbnails(*records: bytes, path: str = "") -> tuple[np.ndarray, np.ndarray]:
    lengths = [len(record) for record in records]
    places = np.stack([np.zeros(len(records)), np.cumsum([0, *lengths[:-1]]), lengths], axis=1)
    return codec.thumbnails(codec.Shards([b"".join(records) + bytes(codec.OVERRUN)]), places, path)


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("quality", [30, 95, 100])
def test_thumbnails_are_the_means_of_the_decoded_pixels(mode: str, quality: int) -> None:
    content = jpeg(sample_image(512, 256, 1, mode), quality=quality)
    image = Image.open(io.BytesIO(content))
    image.draft("L", None)
    expected = np.asarray(image.convert("L"), np.float64).reshape(32, 8, 32, 16).mean(axis=(1, 3))
    for path in codec.paths():
        (ours,), statuses = _thumbnails(codec.pack(content), path=path)
        assert statuses.tolist() == [0]
        assert np.abs(ours - expected).max() < 0.6  # libjpeg rounds every pixel and limits it to 0 to 255


@pytest.mark.parametrize(("width", "height"), [(1, 1), (7, 9), (300, 17), (133, 200), (16, 160), (97, 95)])
def test_blocks_are_distributed_by_their_area(width: int, height: int) -> None:
    (ours,), _ = _thumbnails(codec.pack(jpeg(sample_image(width, height, 2))))
    image = Image.open(io.BytesIO(jpeg(sample_image(width, height, 2))))
    image.draft("L", None)
    pixels = np.asarray(image.convert("L"), np.float64)
    whole = pixels[: height // 8 * 8, : width // 8 * 8]
    if whole.shape == pixels.shape:  # edge blocks contain pixels outside the image
        assert abs(ours.mean() - pixels.mean()) < 0.5
    blocks = np.pad(pixels, ((0, -height % 8), (0, -width % 8)), "edge")
    blocks = np.repeat(np.repeat(blocks.reshape(-(-height // 8), 8, -(-width // 8), 8).mean(axis=(1, 3)), 8, 0), 8, 1)
    fine = np.repeat(np.repeat(blocks[:height, :width], 32, 0), 32, 1)  # every output is a whole number of these
    expected = fine.reshape(32, height, 32, width).mean(axis=(1, 3))
    assert np.abs(ours - expected).mean() < 6  # encoders fill edge blocks differently
    assert np.abs(ours - expected)[: 31 - 256 // height, : 31 - 256 // width].max(initial=0) < 0.6


def test_corrupt_records_are_reported_and_others_read() -> None:
    good = codec.pack(jpeg(sample_image(300, 300)))
    bad = good[:-1] + bytes([good[-1] ^ 1])
    found, statuses = _thumbnails(good, bad, good)
    assert [codec.reason(int(status)) for status in statuses][1] == "the record does not match its checksum"
    assert not statuses[[0, 2]].any()
    assert np.array_equal(found[0], found[2])


# ---- hashes ----

CHANGES = {
    "quality 40": lambda image: (image, 40),
    "half": lambda image: (image.resize((image.width // 2, image.height // 2), Image.LANCZOS), 90),
    "larger": lambda image: (image.resize((image.width * 3 // 2, image.height * 3 // 2)), 80),
    "squashed": lambda image: (image.resize((300, 300)), 90),
    "crop": lambda image: (image.crop((1, 2, image.width - 1, image.height)), 75),
    "gray": lambda image: (image.convert("L"), 90),
    "brighter": lambda image: (ImageEnhance.Brightness(image).enhance(1.1), 90),
}


@pytest.mark.parametrize("name", list(CHANGES))
def test_changed_copies_have_similar_hashes_and_thumbnails(name: str) -> None:
    images = [sample_image(560, 600, seed) for seed in range(6)]
    originals, _ = _thumbnails(*[codec.pack(jpeg(image)) for image in images])
    changed = [CHANGES[name](image) for image in images]
    copies, _ = _thumbnails(*[codec.pack(jpeg(image, quality=quality)) for image, quality in changed])
    assert distance(hashes(originals)[0], hashes(copies)[0]).max() <= MAX_DISTANCE
    assert correlation(originals, copies).min() > 0.95


def test_different_images_have_different_hashes() -> None:
    found, contrast = hashes(_thumbnails(*[codec.pack(jpeg(sample_image(256, 256, seed))) for seed in range(40)])[0])
    assert contrast.all()
    first, second = np.triu_indices(40, 1)
    distances = distance(found[first], found[second])
    assert distances.min() > 2 * MAX_DISTANCE
    assert abs(distances.mean() - HASH_BITS / 2) < 2


def test_flat_images_have_no_contrast() -> None:
    rng = np.random.default_rng(0)
    noise = [Image.fromarray((level + rng.normal(0, 2, (256, 256))).astype(np.uint8)) for level in (40, 128, 220)]
    _, contrast = hashes(_thumbnails(*[codec.pack(jpeg(image)) for image in noise])[0])
    assert not contrast.any()


def test_correlation_is_numpys() -> None:
    rng = np.random.default_rng(0)
    first, second = rng.normal(size=(2, 5, 32, 32))
    theirs = [np.corrcoef(one.ravel(), other.ravel())[0, 1] for one, other in zip(first, second, strict=True)]
    assert correlation(first, second) == pytest.approx(theirs)
    assert correlation(np.zeros((1, 32, 32)), first[:1]).tolist() == [0]


# ---- search ----


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    num=st.integers(0, 120),
    limit=st.integers(0, MAX_DISTANCE),
    chunk=st.sampled_from([1, 7, 1 << 21]),
)
def test_every_pair_within_the_limit_is_found_once(seed: int, num: int, limit: int, chunk: int) -> None:
    rng = np.random.default_rng(seed)
    found = rng.integers(0, 2**64, num, dtype=np.uint64)
    for at in range(1, num):  # most are near another one
        if rng.random() < 0.8:
            bits = rng.choice(HASH_BITS, rng.integers(0, 11), replace=False)
            found[at] = found[rng.integers(at)] ^ np.bitwise_or.reduce(
                np.uint64(1) << bits.astype(np.uint64), initial=0
            )
    first, second = np.triu_indices(num, 1)
    near = np.array([(int(found[a]) ^ int(found[b])).bit_count() <= limit for a, b in zip(first, second, strict=True)])
    expected = {(int(a), int(b)) for a, b, close in zip(first, second, near, strict=True) if close}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hashing, "_PAIRS_AT_ONCE", chunk)
        pairs = [
            (min(a, b), max(a, b))
            for left, right in neighbors(found, limit)
            for a, b in zip(left.tolist(), right.tolist(), strict=True)
        ]
    assert len(pairs) == len(set(pairs))
    assert set(pairs) == expected
