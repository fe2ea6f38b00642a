"""Archives and prepared data behind https:// and s3:// addresses, served by servers that the tests start."""

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import command, complaint, environment
from sample_images import tree
from servers import FileServer

from paceline.data import cache
from paceline.data.description import sealed
from paceline.data.prepare.convert import Variant
from paceline.data.prepare.pack import prepare
from paceline.data.prepare.sources import tree as source
from paceline.data.shards import Dataset
from paceline.errors import UserError
from paceline.system import remote


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


def test_a_copy_is_fetched_once_and_variant_by_variant(prepared: Path, server: FileServer) -> None:
    place = f"{server.address}/out"
    with pytest.raises(UserError, match="holds original, max-32-q90; choose one"):
        cache.local(place)
    folder = cache.local(place, "original")
    assert not (folder / "max-32-q90").exists()
    assert _files(folder / "original") == _files(prepared / "out" / "original")
    server.asked.clear()
    assert cache.local(place + "/", "original") == folder
    assert server.asked == [("/out/dataset.json", 0)]
    cache.local(place, "max-32-q90")
    assert _files(folder) == _files(prepared / "out")
    with pytest.raises(UserError, match="'other' is not in"):
        cache.local(place, "other")


@pytest.mark.parametrize("ranges", [True, False])
def test_broken_connections_are_taken_up_where_they_broke(prepared: Path, server: FileServer, ranges: bool) -> None:
    server.break_after, server.ranges = 3, ranges
    folder = cache.local(f"{server.address}/out", "original")
    assert _files(folder / "original") == _files(prepared / "out" / "original")
    assert sum(begin > 0 for _, begin in server.asked) >= 2


def test_what_an_interruption_left_is_used(prepared: Path, server: FileServer) -> None:
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
    shard.with_name(".shard-00000.pcl.part").write_bytes(bytes(5000))  # not what it should be: fetched anew
    cache.local(f"{server.address}/out", "original")
    assert shard.read_bytes() == content


def test_data_that_does_not_match_its_checksums_is_refused(prepared: Path, server: FileServer, tmp_path: Path) -> None:
    shutil.copytree(prepared / "out", tmp_path / "served")
    server.root = tmp_path
    corrupt = tmp_path / "served" / "original" / "val" / "shard-00000.pcl"
    content = bytearray(corrupt.read_bytes())
    content[100] ^= 1
    corrupt.write_bytes(content)
    with pytest.raises(UserError, match=r"val/shard-00000.pcl does not match its checksum"):
        cache.local(f"{server.address}/served", "original")
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
def test_a_description_cannot_lead_out_of_its_folder(
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
    with pytest.raises(UserError, match=r"dataset.json is corrupt \("):
        cache.local(server.address, "original")
    assert not cache.cache_folder().exists()
    with pytest.raises(UserError, match=r"dataset.json is corrupt \("):
        Dataset.open(tmp_path)


def test_more_bytes_than_there_should_be_are_not_fetched(prepared: Path, server: FileServer, tmp_path: Path) -> None:
    shutil.copytree(prepared / "out", tmp_path / "served")
    server.root = tmp_path
    names = tmp_path / "served" / "original" / "val" / "names.txt"
    names.write_bytes(names.read_bytes() + bytes(1 << 20))
    folder = cache.local(f"{server.address}/served", "original")
    assert _files(folder / "original") == _files(prepared / "out" / "original")


def test_a_complete_copy_is_used_from_a_disk_that_cannot_be_written(server: FileServer, monkeypatch) -> None:
    folder = cache.local(f"{server.address}/out", "original")
    monkeypatch.setattr(cache, "FolderLock", None)
    assert cache.local(f"{server.address}/out", "original") == folder


def test_secrets_in_addresses_are_not_shown() -> None:
    place = "https://user:word@host/path/train.tar?X-Amz-Signature=secret"
    assert remote.shown(place) == "https://host/path/train.tar"


def test_addresses_that_lead_nowhere(server: FileServer, here: Callable, monkeypatch) -> None:
    monkeypatch.setattr(remote, "_PAUSE", 0.01)
    message = complaint(here("data", f"{server.address}/nothing"))
    assert f"{server.address}/nothing/dataset.json cannot be read (HTTP Error 404: Not Found)" in message
    assert "Connection refused" in complaint(here("data", "http://127.0.0.1:9/x"))
    assert "https://[bad/dataset.json cannot be read" in complaint(here("data", "https://[bad"))
    words = ("--data.name", "folder", "--data.path", f"{server.address}/out", "--data.augment", "{}")
    assert "is prepared images, not an image folder (data.name=folder)" in complaint(here("train", "digits", *words))


def test_ranks_of_one_machine_fetch_once(server: FileServer, tmp_path: Path) -> None:
    """Two processes train from an address; each file goes over the wire once."""
    words = ("--data.name", "shards", "--data.path", f"{server.address}/out", "--data.variant", "original")
    more = (
        "--data.size",
        24,
        "--data.augment",
        "{}",
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
    """A bucket of moto's server that holds the prepared data."""
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
    client.create_bucket(Bucket="photographs")
    for path in (prepared / "out").rglob("*"):
        if path.is_file():
            client.upload_file(str(path), "photographs", str(path.relative_to(prepared)))
    yield "s3://photographs"
    server.stop()


def test_s3(bucket: str, prepared: Path, here: Callable, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))  # `here` has cleared it
    folder = cache.local(f"{bucket}/out", "max-32-q90")
    assert _files(folder / "max-32-q90") == _files(prepared / "out" / "max-32-q90")
    description = (prepared / "out" / "dataset.json").read_bytes()
    with remote.opened(f"{bucket}/out/dataset.json", 10) as stream:
        assert stream.read() == description[10:]
    assert remote.size(f"{bucket}/out/dataset.json") == len(description)
    message = complaint(here("data", f"{bucket}/nowhere"))
    assert "s3://photographs/nowhere/dataset.json cannot be read" in message
    assert "AWS_*" in message


def test_a_full_disk_is_known_before(server: FileServer, monkeypatch) -> None:
    free = shutil.disk_usage("/")._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    with pytest.raises(UserError, match=r"0.1 kB free, but [\d.]+ kB are to be fetched; choose another disk"):
        cache.local(f"{server.address}/out", "original")
