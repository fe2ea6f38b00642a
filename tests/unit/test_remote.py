"""Prepared data at https:// and s3:// URLs, on servers that the tests start."""

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import command, complaint, environment, raises
from sample_images import tree
from servers import FileServer

from paceline.data import cache
from paceline.data.description import sealed
from paceline.data.prepare.convert import Variant
from paceline.data.prepare.pack import prepare
from paceline.data.prepare.sources import tree as source
from paceline.data.shards import Dataset
from paceline.system import remote

_ODD_NAME = "100% of a+b #1? &ü 日本"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    prepare(source(tree(folder / "in", images=6), "folder"), folder / "out", [Variant(), Variant(max_side=32)], 2)
    shutil.rmtree(folder / "in")
    return folder


@pytest.fixture
def server(prepared: Path, tmp_path: Path, monkeypatch) -> Iterator[FileServer]:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "_PAUSE", 0.01)
    with FileServer(prepared).running() as running:
        yield running


def _files(folder: Path) -> dict[str, bytes]:
    found = (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.name.startswith("."))
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def test_each_variant_is_downloaded_once(prepared: Path, server: FileServer) -> None:
    url = f"{server.address}/out"
    with raises("variant-required") as caught:
        cache.local(url)
    assert caught.value.fields["variants"] == ["original", "max-32-q90"]
    folder = cache.local(url, "original")
    assert not (folder / "max-32-q90").exists()
    assert _files(folder / "original") == _files(prepared / "out" / "original")
    server.asked.clear()
    assert cache.local(url + "/", "original") == folder
    assert server.asked == [("/out/dataset.json", 0)]
    cache.local(url, "max-32-q90")
    assert _files(folder) == _files(prepared / "out")
    with raises("unknown-variant") as caught:
        cache.local(url, "other")
    assert caught.value.fields["variant"] == "other"


@pytest.mark.parametrize("ranges", [True, False])
def test_downloads_resume_after_broken_connections(prepared: Path, server: FileServer, ranges: bool) -> None:
    server.break_after, server.ranges = 3, ranges
    folder = cache.local(f"{server.address}/out", "original")
    assert _files(folder / "original") == _files(prepared / "out" / "original")
    assert sum(begin > 0 for _, begin in server.asked) >= 2


def test_interrupted_downloads_resume(prepared: Path, server: FileServer) -> None:
    folder = cache.local(f"{server.address}/out", "original")
    shard = folder / "original" / "train" / "shard-00000.pcl"
    content = shard.read_bytes()
    shard.unlink()
    shard.with_name(".shard-00000.pcl.part").write_bytes(content[:5000])
    server.asked.clear()
    cache.local(f"{server.address}/out", "original")
    assert ("/out/original/train/shard-00000.pcl", 5000) in server.asked
    assert shard.read_bytes() == content
    shard.unlink()
    shard.with_name(".shard-00000.pcl.part").write_bytes(bytes(5000))  # corrupt: downloaded again
    cache.local(f"{server.address}/out", "original")
    assert shard.read_bytes() == content


def test_download_with_a_wrong_checksum_is_rejected(prepared: Path, server: FileServer, tmp_path: Path) -> None:
    shutil.copytree(prepared / "out", tmp_path / "served")
    server.root = tmp_path
    corrupt = tmp_path / "served" / "original" / "val" / "shard-00000.pcl"
    content = bytearray(corrupt.read_bytes())
    content[100] ^= 1
    corrupt.write_bytes(content)
    with raises("checksum-mismatch") as caught:
        cache.local(f"{server.address}/served", "original")
    assert caught.value.fields["url"] == f"{server.address}/served/original/val/shard-00000.pcl"
    assert not list(cache.cache_folder().glob("*/dataset.json"))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("name", "../../elsewhere"),
        ("classes.0.id", "/tmp/elsewhere"),
        ("variants.original.splits.train.lists.0.file", "/tmp/elsewhere"),
        ("variants.original.splits.train.shards.0.file", "../../elsewhere"),
        ("variants.original.splits.train.shards.0.bytes", -1),
        ("variants", {"../elsewhere": {"splits": {}}}),
        ("classes", None),
    ],
)
def test_description_with_path_traversal_is_rejected(
    prepared: Path, server: FileServer, tmp_path: Path, path: str, value: object
) -> None:
    description = json.loads((prepared / "out" / "dataset.json").read_text())
    node = description
    *parents, last = path.split(".")
    for parent in parents:
        node = node[int(parent) if isinstance(node, list) else parent]
    node[last] = value
    (tmp_path / "dataset.json").write_text(json.dumps(sealed(description)))
    server.root = tmp_path
    with raises("dataset-corrupt") as caught:
        cache.local(server.address, "original")
    assert caught.value.fields["path"] == f"{server.address}/dataset.json"
    assert not cache.cache_folder().exists()
    with raises("dataset-corrupt") as caught:
        Dataset.open(tmp_path)
    assert caught.value.fields["path"] == str(tmp_path / "dataset.json")


def test_bytes_after_the_expected_size_are_not_downloaded(prepared: Path, server: FileServer, tmp_path: Path) -> None:
    shutil.copytree(prepared / "out", tmp_path / "served")
    server.root = tmp_path
    names = tmp_path / "served" / "original" / "val" / "names.txt"
    names.write_bytes(names.read_bytes() + bytes(1 << 20))
    folder = cache.local(f"{server.address}/served", "original")
    assert _files(folder / "original") == _files(prepared / "out" / "original")


def test_complete_copy_on_a_read_only_disk_is_used(server: FileServer, monkeypatch) -> None:
    folder = cache.local(f"{server.address}/out", "original")
    monkeypatch.setattr(cache, "FolderLock", None)
    assert cache.local(f"{server.address}/out", "original") == folder


def test_secrets_in_urls_are_not_shown() -> None:
    url = "https://user:word@host/path/train.tar?X-Amz-Signature=secret"
    assert remote.redacted(url) == "https://host/path/train.tar"
    assert remote.redacted("s3://user:word@bucket/a?b#c@d") == "s3://bucket/a?b#c@d"


def test_unreadable_urls_are_reported(server: FileServer, here: Callable, monkeypatch) -> None:
    monkeypatch.setattr(remote, "_PAUSE", 0.01)
    message = complaint(here("data", f"{server.address}/nothing"))
    assert "[url-unreadable]" in message
    assert f"{server.address}/nothing/dataset.json" in message
    assert "HTTP Error 404: Not Found" in message
    message = complaint(here("data", "http://127.0.0.1:9/x"))
    assert "[url-unreadable]" in message
    assert "Connection refused" in message
    message = complaint(here("data", "https://[bad"))
    assert "[url-unreadable]" in message
    assert "https://[bad/dataset.json" in message
    words = ("--data.name", "folder", "--data.path", f"{server.address}/out", "--data.augment", "null")
    message = complaint(here("train", "digits", *words))
    assert "[data-kind-mismatch]" in message
    assert "data.name=folder" in message


def test_ranks_of_one_node_download_once(server: FileServer, tmp_path: Path) -> None:
    """Two processes train from a URL; each file is downloaded once."""
    words = ("--data.name", "shards", "--data.path", f"{server.address}/out", "--data.variant", "original")
    more = (
        "--data.size",
        24,
        "--data.augment",
        "null",
        "--train.global_batch",
        6,
        "--train.duration",
        "2ba",
        "--log.tensorboard",
        "false",
    )
    model = ("--model.options", "{widths: [8, 16], norm: group}")
    cached = environment() | {"PACELINE_CACHE": str(tmp_path / "both")}
    subprocess.run(
        command("train", "digits", *words, *more, *model, "--procs", 2), cwd=tmp_path, env=cached, check=True
    )
    shards = [path for path, _ in server.asked if path.endswith(".pcl")]
    assert sorted(shards) == [f"/out/original/{split}/shard-00000.pcl" for split in ("train", "val")]


# ---- S3 ----


@pytest.fixture
def bucket(prepared: Path, monkeypatch) -> Iterator[str]:
    """A bucket with the prepared data, on a server of moto."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    settings = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3", region_name="us-east-1")
    client.create_bucket(Bucket="images")
    for path in (prepared / "out").rglob("*"):
        if path.is_file():
            client.upload_file(str(path), "images", str(path.relative_to(prepared)))
    yield "s3://images"
    server.stop()


def test_data_is_read_from_s3(bucket: str, prepared: Path, here: Callable, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))  # `here` has cleared it
    folder = cache.local(f"{bucket}/out", "max-32-q90")
    assert _files(folder / "max-32-q90") == _files(prepared / "out" / "max-32-q90")
    description = (prepared / "out" / "dataset.json").read_bytes()
    with remote.opened(f"{bucket}/out/dataset.json", 10) as stream:
        assert stream.read() == description[10:]
    assert remote.size(f"{bucket}/out/dataset.json") == len(description)
    message = complaint(here("data", f"{bucket}/nowhere"))
    assert "[url-unreadable]" in message
    assert "s3://images/nowhere/dataset.json" in message
    assert "AWS_*" in message


def test_keys_of_s3_are_not_percent_encoded(bucket: str, prepared: Path, tmp_path: Path, monkeypatch) -> None:
    """As in the AWS CLI: what is uploaded under a name is found under it."""
    import boto3

    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    client = boto3.client("s3", region_name="us-east-1")
    for path in (path for path in (prepared / "out").rglob("*") if path.is_file()):
        client.upload_file(str(path), "images", f"{_ODD_NAME}/{path.relative_to(prepared / 'out')}")
    folder = cache.local(f"{bucket}/{_ODD_NAME}", "original")
    assert _files(folder / "original") == _files(prepared / "out" / "original")
    with raises("url-unreadable") as caught:
        cache.local(f"{bucket}/{_ODD_NAME}/nowhere")
    assert caught.value.fields["url"] == f"{bucket}/{_ODD_NAME}/nowhere/dataset.json"


@pytest.mark.parametrize("place", ["s3://images/x", f"s3://images/x of {_ODD_NAME}"])
def test_object_store_finds_every_name(bucket: str, tmp_path: Path, place: str) -> None:
    names = {_ODD_NAME, f"{_ODD_NAME}/{_ODD_NAME}", "a%20b", "a b", "~[x]{y}|'\"*<>^`\\"}
    store = remote.ObjectStore(place)
    for name in names:
        (tmp_path / "file").write_text(name)
        store.upload(name, tmp_path / "file")
    assert store.files() == {name: len(name.encode()) for name in names}
    for name in names:
        with store.opened(name) as stream, remote.opened(remote.join(place, name)) as same:
            assert stream.read() == same.read() == name.encode()
        assert remote.last_name(remote.join(place, name)) == name.rpartition("/")[2]
        store.copy(name, "copy")
        store.delete(name)
    assert set(store.files()) == {"copy"}


def test_names_in_https_urls_are_percent_encoded() -> None:
    url = remote.join("https://host/images", "a b#1")
    assert url == "https://host/images/a%20b%231"
    assert remote.last_name(url) == "a b#1"


def test_disk_space_is_checked_before_downloading(server: FileServer, monkeypatch) -> None:
    free = shutil.disk_usage("/")._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    with raises("disk-full") as caught:
        cache.local(f"{server.address}/out", "original")
    assert "0.1 kB free" in str(caught.value)
    assert "PACELINE_CACHE" in str(caught.value)
