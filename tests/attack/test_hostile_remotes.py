"""Prepared data at untrusted URLs: nothing is written outside of the cache, and nothing unverified is used."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest import raises
from servers import FileServer

from attack.datasets import Change, change, crops, make_shards
from paceline.data import cache, description
from paceline.data.description import DESCRIPTION
from paceline.system import remote


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    return make_shards(tmp_path_factory.mktemp("prepared"))


@pytest.fixture
def data(prepared: Path, tmp_path: Path) -> Path:
    return shutil.copytree(prepared, tmp_path / "data")


@pytest.fixture
def server(data: Path, tmp_path: Path, monkeypatch) -> Iterator[FileServer]:
    monkeypatch.setattr(remote, "_PAUSE", 0.01)
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    with FileServer(data).running() as running:
        yield running


TRAVERSALS = ["../x", "../../x", "/tmp/x", "..", ".", "", ".x", "a/b", "a\\b", "a\0b", "a\nb", "~", "x" * 300]


def test_names_that_lead_out_of_the_cache_are_rejected(
    server: FileServer, data: Path, tmp_path: Path, survived
) -> None:
    text = (data / DESCRIPTION).read_text()
    changes: list[Change] = []
    for name in TRAVERSALS:
        changes += [
            lambda it, name=name: it.update(name=name),
            lambda it, name=name: it["variants"].update({name: it["variants"].pop("original")}),
            lambda it, name=name: it["splits"].update({name: it["splits"].pop("train")}),
            lambda it, name=name: it["variants"]["original"]["splits"]["train"]["shards"][0].update(file=name),
            lambda it, name=name: it["variants"]["original"]["splits"]["train"]["lists"][0].update(file=name),
        ]
    before = sorted(tmp_path.rglob("*"))
    for how in changes:
        (data / DESCRIPTION).write_text(text)
        change(data, how)
        with raises("dataset-corrupt") as caught:
            cache.local(server.address, "original")
        assert caught.value.fields["path"] == f"{server.address}/{DESCRIPTION}"
    assert sorted(tmp_path.rglob("*")) == before
    survived("names that lead out of the cache", len(changes))


def test_links_in_a_shared_cache_are_not_followed(server: FileServer, data: Path, tmp_path: Path, survived) -> None:
    folder = cache.local(server.address, "original")
    (tmp_path / "outside").mkdir()
    shutil.rmtree(folder / "original")
    (folder / "original").symlink_to(tmp_path / "outside")
    with raises("link-outside-folder") as caught:
        cache.local(server.address, "original")
    assert caught.value.fields["path"].parent == folder / "original"
    (folder / "original").unlink()
    (folder / "original" / "train").mkdir(parents=True)
    (tmp_path / "precious").touch()
    (folder / "original" / "train" / ".shard-00000.pcl.part").symlink_to(tmp_path / "precious")
    with raises("cache-not-writable"):
        cache.local(server.address, "original")
    assert not list((tmp_path / "outside").iterdir())
    assert not (tmp_path / "precious").read_bytes()
    survived("links in a shared cache", 2)


def test_huge_descriptions_are_not_read(server: FileServer, data: Path, monkeypatch, survived) -> None:
    for module in (cache, description):
        monkeypatch.setattr(module, "MAX_DESCRIPTION_BYTES", 100_000)
    with (data / DESCRIPTION).open("ab") as file:
        file.write(b" " * 1_000_000)
    with raises("dataset-unreadable") as caught:
        cache.local(server.address, "original")
    assert "larger than 100.0 kB" in str(caught.value)
    assert not cache.cache_folder().exists()
    survived("huge files")


def test_downloads_with_wrong_checksums_never_get_their_final_name(server: FileServer, data: Path, survived) -> None:
    shard = data / "original" / "train" / "shard-00000.pcl"
    content = shard.read_bytes()
    served = [content[:-1] + b"x", b"x" + content[1:], bytes(len(content))]
    for other in served:
        shard.write_bytes(other)
        with raises("checksum-mismatch") as caught:
            cache.local(server.address, "original")
        assert caught.value.fields["url"] == f"{server.address}/original/train/shard-00000.pcl"
        assert not list(cache.cache_folder().rglob("*/train/shard-00000.pcl"))
        assert not list(cache.cache_folder().rglob(DESCRIPTION))
    shard.write_bytes(content)
    assert np.array_equal(crops(cache.local(server.address, "original"))[0], crops(data)[0])
    survived("served files that do not match their checksums", len(served))
