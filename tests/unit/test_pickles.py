"""Pickles are read as data: those of CIFAR are read exactly, anything else is rejected without being executed."""

import pickle
from pathlib import Path

import numpy as np
import pytest
from hostile import exploits, python2_batch

from paceline.data.prepare import cifar
from paceline.data.prepare.pickles import read_dictionary

RNG = np.random.default_rng(0)
IMAGES, LABELS = RNG.integers(0, 256, (300, 3072), dtype=np.uint8), [number * 7 % 10 for number in range(300)]


def test_batch_of_python_2_is_read_like_pickle_loads() -> None:
    content = python2_batch(IMAGES, LABELS)
    given, read = pickle.loads(content, encoding="bytes"), read_dictionary(content)
    assert read.keys() == {key.decode() for key in given} == {"batch_label", "labels", "data", "filenames"}
    assert np.array_equal(read["data"], given[b"data"])
    assert (read["data"].dtype, read["data"].shape) == (np.uint8, (300, 3072))
    assert read["labels"] == given[b"labels"] == LABELS
    assert read["filenames"] == [name.decode() for name in given[b"filenames"]]


@pytest.mark.parametrize("protocol", [1, 2, 3, 4, 5])
def test_batches_of_python_3_are_read(protocol: int) -> None:
    for data, labels in ((IMAGES, LABELS), (np.asfortranarray(IMAGES), np.array(LABELS))):
        batch = {b"labels": labels, b"data": data, b"filenames": [b"a.png"] * 300}
        for written in (batch, {key.decode(): value for key, value in batch.items()}):
            pixels, numbers = cifar._pickled(cifar.CIFAR10, pickle.dumps(written, protocol))
            assert np.array_equal(pixels, IMAGES.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
            assert numbers.tolist() == LABELS


def test_names_in_a_pickle_are_never_called_or_dereferenced(tmp_path: Path) -> None:
    for what, content in exploits(tmp_path / "canary").items():
        with pytest.raises((ValueError, KeyError)):
            print(what, cifar._pickled(cifar.CIFAR10, content))
    assert not (tmp_path / "canary").exists()


def test_sizes_are_bounded() -> None:
    with pytest.raises(ValueError, match="more than 250,000 opcodes"):
        read_dictionary(b"\x80\x02" + b"]" * 300_000 + b".")
    with pytest.raises(ValueError, match="a corrupt pickle"):
        read_dictionary(b"\x80\x02h\x07.")
    with pytest.raises(ValueError, match="does not hold a dictionary"):
        read_dictionary(pickle.dumps([1]))
