"""Untrusted archives of CIFAR-10 and ImageNet, mutated and crafted to execute code, crash or exhaust memory."""

import bz2
import gzip
import io
import lzma
import pickle
import pickletools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest import complaint, raises
from hostile import attributes, deep_mat, exploits, in_a_process, member, mutated, python2_batch, sparse, tar_of
from sample_images import jpeg, sample_image

from paceline.data.prepare import cifar, imagenet
from paceline.data.prepare.tars import archive
from paceline.errors import UserError

_NAMES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")
_END = bytes(1024)


def _batches() -> list[bytes]:
    images = np.random.default_rng(0).integers(0, 256, (4, 3072), dtype=np.uint8)
    batch = {b"labels": [1, 2, 3, 4], b"data": images, b"filenames": [b"a.png", b"b.png"]}
    return [python2_batch(images, [1, 2, 3, 4]), *(pickle.dumps(batch, protocol) for protocol in (2, 4, 5))]


def _with_every_opcode(content: bytes) -> Iterator[bytes]:
    places = [place for _, _, place in pickletools.genops(content) if place is not None][1:]
    operands = (b"", b"\x00", b"\x01\x00\x00\x00", b"posix\nsystem\n", b"\x06\x00\x00\x00system", b"1\n", b"\xff" * 8)
    for place in places[:: max(1, len(places) // 16)]:
        for opcode in pickletools.opcodes:
            for operand in operands:
                yield content[:place] + opcode.code.encode("latin-1") + operand + content[place:]


def _read_batches(contents: Iterator[bytes]) -> int:
    tried = 0
    for content in contents:
        try:
            pixels, labels = cifar._pickled(cifar.CIFAR10, content)
        except (ValueError, KeyError):
            pass
        else:
            assert pixels.shape[1:] == (32, 32, 3)
            assert labels.max() < 10
        tried += 1
    return tried


def _mutated_batches() -> int:
    return sum(_read_batches(mutated(batch, 1500, seed)) for seed, batch in enumerate(_batches()))


def _batches_with_opcodes() -> int:
    return sum(_read_batches(_with_every_opcode(batch)) for batch in _batches())


def test_mutated_pickles_are_rejected_or_read(survived) -> None:
    survived("mutated pickles", in_a_process(_mutated_batches))


def test_pickles_with_any_opcode_inserted_are_rejected_or_read(survived) -> None:
    survived("pickles with an opcode inserted", in_a_process(_batches_with_opcodes))


def _rejected(out: Path, archives: list[bytes]) -> int:
    path = out / "hostile.tar"
    for content in archives:
        path.write_bytes(content)
        with pytest.raises(UserError) as caught:
            cifar.prepare(cifar.CIFAR10, out, path)
        assert caught.value.code in ("not-cifar", "archive-corrupt", "archive-member-too-large"), caught.value.report
        assert str(caught.value.fields["path"]) == str(path)
        assert not (out / "dataset.json").exists()
    return len(archives)


def test_pickles_that_execute_code_or_dereference_addresses_are_rejected(paceline, tmp_path: Path, survived) -> None:
    canary = tmp_path / "canary"
    archives = [tar_of(dict.fromkeys(_NAMES, content)) for content in exploits(canary).values()]
    count = in_a_process(_rejected, tmp_path, archives)
    (tmp_path / "one.tar").write_bytes(archives[0])
    message = complaint(paceline("prepare", "cifar10", "--out", "out", "--from", "one.tar"))
    assert "[not-cifar]" in message
    assert "one.tar" in message
    assert not canary.exists()
    survived("pickles that execute code or dereference addresses", count + 1)


def test_other_invalid_archives_of_cifar10_are_rejected(tmp_path: Path, survived) -> None:
    deep = b"[" * 200_000
    npm = {f"{name}.png": b"%!PS-Adobe-3.0 EPSF-3.0" for name in _NAMES}
    archives = [
        tar_of(npm | {"train_lables.json": b"[0]", "test_lables.json": b"[0]"}),
        tar_of(npm | {"train_lables.json": deep, "test_lables.json": deep}),
        tar_of({f"{name}.bin": b"x" * 3072 for name in _NAMES}),
        tar_of({}),
        member(b"data_batch_1", 5 << 40) + _END,
        sparse(b"data_batch_1", 5 << 40) + _END,
        gzip.compress(member(b"data_batch_1", 1 << 27, body=bytes(1 << 27)) + _END),
        gzip.compress(tar_of(dict.fromkeys(_NAMES, b".")))[:-9],
    ]
    survived("archives that are not CIFAR-10", in_a_process(_rejected, tmp_path, archives))


def _hostile_tars() -> list[bytes]:
    """Tars that must be rejected without reading their members."""
    return [
        sparse(b"a.jpg", 5 << 40) + _END,
        attributes(GNU_sparse_major="0", GNU_sparse_minor="1", GNU_sparse_size="9" * 12, GNU_sparse_map="0,0")
        + member(b"a.jpg", 0),
        attributes(GNU_sparse_major="1", GNU_sparse_minor="0") + member(b"a.jpg", 3, body=b"9\n1") + _END,
        member(b"a.jpg", 5 << 40) + _END,
        member(b"a.jpg", -512) + _END,
        attributes(size="-1024") + member(b"a.jpg", 0) + _END,
        *(member(b"long", size, kind) + _END for kind in (b"x", b"g", b"L", b"K") for size in (1 << 20, 5 << 40, -1)),
        member(b"long", 2, b"L", b"a\0") * 5000 + _END,
        attributes(path="a") * 5000 + _END,
        member(b"digits", 16_000, b"x", b"1" * 16_000) + member(b"a.jpg", 5 << 40),
        gzip.compress(member(b"long", 1 << 28, b"x", bytes(1 << 28))),
    ]


def _read_tars(contents: Iterator[bytes]) -> tuple[int, int]:
    """Return how many were read to the end, and how many were rejected."""
    read = rejected = 0
    for content in contents:
        try:
            for found in archive(io.BytesIO(content), "hostile.tar"):
                assert "/" not in found.name
                assert len(found.read(1 << 16)) <= 1 << 16
            read += 1
        except UserError:
            rejected += 1
    return read, rejected


def _crafted_tars() -> tuple[int, int]:
    return _read_tars(iter(_hostile_tars()))


def _mutated_tars() -> tuple[int, int]:
    files = {"a.jpg": jpeg(sample_image(16, 16)), "folder/b.jpg": b"x" * 700, "c" * 300: b"long"}
    linked = tar_of(files)[:-1024] + member(b"link", 0, b"2", link=b"/etc/passwd") + attributes(path="d" * 50)
    plain = linked + member(b"d", 1, body=b"x") + sparse(b"e", 100) + _END
    packed = [plain, *(pack(plain) for pack in (gzip.compress, bz2.compress, lzma.compress))]
    results = [_read_tars(mutated(content, 750, seed)) for seed, content in enumerate(packed)]
    results += [_read_tars(content[:length] for length in range(100)) for content in packed]
    return sum(read for read, _ in results), sum(rejected for _, rejected in results)


def test_tars_that_claim_too_much_or_form_loops_are_rejected(survived) -> None:
    read, rejected = in_a_process(_crafted_tars)
    assert read == 0
    survived("tars that claim too much or form loops", rejected)


def test_mutated_tars_are_rejected_or_read(survived) -> None:
    survived("mutated tars", sum(in_a_process(_mutated_tars)))


def _devkits() -> int:
    place = Path("hostile-devkit.tar")
    hostile = (deep_mat(100_000), deep_mat(3), b"", b"MATLAB 5.0".ljust(128, b"\xff"), pickle.dumps([]))
    for mat in hostile:
        place.write_bytes(tar_of({"meta.mat": mat, "ILSVRC2012_validation_ground_truth.txt": b"1\n" * 5}))
        with raises("devkit-corrupt") as caught:
            imagenet.from_archives("train.tar", "val.tar", str(place))
        assert caught.value.fields["path"] == str(place)
    return len(hostile)


def test_hostile_devkits_are_rejected(tmp_path: Path, monkeypatch, survived) -> None:
    monkeypatch.chdir(tmp_path)
    survived("devkits that crash or confuse SciPy", in_a_process(_devkits))
