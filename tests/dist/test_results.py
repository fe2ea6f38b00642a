"""Results in an object store: uploaded during a run, and downloaded to resume it."""

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import TINY, raises
from processes import free_port

from paceline.checkpoint import store
from paceline.checkpoint.results import Results, download
from paceline.system import remote
from paceline.track.records import RunFolder

boto3 = pytest.importorskip("boto3", reason="needs boto3: pip install 'paceline[dev]'")


@pytest.fixture
def bucket(monkeypatch) -> Iterator["object"]:
    """A bucket of a moto server, which the test can stop and start."""
    from moto.server import ThreadedMotoServer

    port = free_port()  # the same when the server is restarted
    server = ThreadedMotoServer("127.0.0.1", port, verbose=False)
    server.start()
    variables = {"AWS_ACCESS_KEY_ID": "canary-key", "AWS_SECRET_ACCESS_KEY": "canary-secret", "AWS_REGION": "us-east-1"}
    variables |= {"AWS_DEFAULT_REGION": "us-east-1", "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3")
    client.create_bucket(Bucket="results")
    client.server = server
    yield client
    server.stop()


def _keys(client) -> set[str]:
    return {entry["Key"] for entry in client.list_objects_v2(Bucket="results").get("Contents", [])}


def test_results_are_uploaded_and_can_be_resumed_elsewhere(here, tmp_path: Path, bucket, monkeypatch) -> None:
    words = ("digits", *TINY, "--train.duration", "20ba", "--results", "s3://results/some/where")
    answer = here("train", *words)
    assert answer.returncode == 0, answer.stderr
    keys = _keys(bucket)
    run = tmp_path / "runs" / "digits"
    kept = [path.name for path in store.committed(run / "checkpoints")]
    for name in ("recipe.yaml", "metrics.jsonl", "summary.json", f"checkpoints/{kept[0]}/COMMIT"):
        assert f"some/where/digits/{name}" in keys
    assert {key.split("/")[4] for key in keys if "/checkpoints/" in key} == {*kept, "best"}
    assert any("/telemetry/" in key for key in keys)
    there = bucket.get_object(Bucket="results", Key="some/where/digits/summary.json")["Body"].read()
    assert json.loads(there)["status"] == "finished"
    text = "".join(path.read_text(errors="replace") for path in run.rglob("*") if path.is_file())
    assert "canary" not in text + answer.stderr
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    again = here("train", "--resume", "s3://results/some/where/digits", "--train.duration", "30ba")
    assert again.returncode == 0, again.stderr
    assert "resuming from step 20" in again.stderr
    assert RunFolder(elsewhere / "runs" / "digits").read_summary()["step"] == 30
    for place, code in (
        ("s3://results/nothing/here", "results-not-a-run"),
        ("s3://no-such-bucket/run", "results-unreadable"),
    ):
        wrong = here("train", "--resume", place)
        assert wrong.returncode == 1
        assert place in wrong.stderr
        assert f"[{code}]" in wrong.stderr


def _folder(run: Path, begun: str = "today") -> Path:
    run.mkdir(parents=True)
    (run / "recipe.yaml").write_text("name: digits\n")
    (run / "environment.json").write_text(json.dumps({"starts": [{"started": begun}]}))
    (run / "metrics.jsonl").write_text("1\n")
    return run


def _write_checkpoint(run: Path, step: int) -> None:
    store.write(run / "checkpoints" / f"step-{step:08}", step, {"model": {"weight": torch.zeros(1)}}, {})


def test_unusable_store_is_an_error_before_training(tmp_path: Path, bucket) -> None:
    with raises("results-not-writable") as caught:
        Results(_folder(tmp_path / "run"), "s3://nowhere", "top1")
    assert caught.value.fields == {"url": "s3://nowhere/run"}
    assert "--pass" in str(caught.value)
    Results(tmp_path / "run", "s3://results", "top1", every=1000).close()
    Results(tmp_path / "run", "s3://results", "top1", every=1000).close()  # the same run, started again
    with raises("results-of-another-run") as caught:
        Results(_folder(tmp_path / "elsewhere" / "run", begun="tomorrow"), "s3://results", "top1")
    assert caught.value.fields == {"url": "s3://results/run"}


def test_old_checkpoints_of_an_earlier_start_are_removed(tmp_path: Path, bucket, monkeypatch) -> None:
    monkeypatch.setattr(store, "best", lambda *_: None)
    run = _folder(tmp_path / "run")
    _write_checkpoint(run, 10)
    Results(run, "s3://results", "top1", every=1000).close()
    shutil.rmtree(run / "checkpoints")
    _write_checkpoint(run, 20)
    Results(run, "s3://results", "top1", every=1000).close()
    assert {key.split("/")[2] for key in _keys(bucket) if key.startswith("run/checkpoints")} == {"step-00000020"}


def test_tags_that_are_not_checksums(tmp_path: Path, bucket, monkeypatch) -> None:
    """As in encrypted buckets."""
    import obstore

    put = obstore.put
    monkeypatch.setattr(obstore, "put", lambda *words, **more: put(*words, **more) | {"e_tag": '"' + 32 * "0" + '"'})
    results = Results(_folder(tmp_path / "run"), "s3://results", "top1", every=1000)
    assert results._try()
    monkeypatch.setattr(obstore, "put", lambda place, name, _, **more: put(place, name, b"") | {"e_tag": 32 * "0"})
    (tmp_path / "run" / "metrics.jsonl").write_text("1\n2\n")
    assert not results._try()
    monkeypatch.setattr(obstore, "put", put)
    results.close()


@pytest.mark.parametrize("damage", ["", "flipped", "truncated"])
def test_large_files_are_uploaded_in_parts_and_verified(tmp_path: Path, bucket, monkeypatch, damage: str) -> None:
    import obstore

    content = random.Random(0).randbytes(2 * remote._PART + 1)
    sent: list[int] = []
    put = obstore.put

    def damaging(place, name: str, parts, **more):
        assert not isinstance(parts, bytes)  # the whole file is never in memory

        def damaged() -> Iterator[bytes]:
            for number, part in enumerate(parts):
                sent.append(len(part))
                if number == 1 and damage:
                    yield part[:-1] + (bytes([part[-1] ^ 1]) if damage == "flipped" else b"")
                else:
                    yield part

        return put(place, name, damaged(), **more)

    monkeypatch.setattr(obstore, "put", damaging)
    path = tmp_path / "weights.safetensors"
    path.write_bytes(content)
    target = remote.ObjectStore("s3://results/large")
    if damage:
        with pytest.raises(OSError, match="corrupt in the store"):
            target.upload("weights", path)
    else:
        target.upload("weights", path)
        assert bucket.head_object(Bucket="results", Key="large/weights")["ETag"].endswith('-3"')
        with target.opened("weights", 5) as stream:
            assert stream.read() == content[5:]
    assert sent == [remote._PART, remote._PART, 1]


@pytest.mark.parametrize("name", ["run", "run #1, 50%25 ü"])
def test_run_is_downloaded_and_replaces_older_files(tmp_path: Path, bucket, monkeypatch, name: str) -> None:
    monkeypatch.setattr(store, "best", lambda *_: None)
    run = _folder(tmp_path / name)
    _write_checkpoint(run, 10)
    Results(run, "s3://results", "top1", every=1000).close()
    here = _folder(tmp_path / "here" / name, begun="other")  # as long as "today"
    assert download(f"s3://results/{name}", tmp_path / "here") == here
    for path in (path for path in run.rglob("*") if path.is_file()):
        assert (here / path.relative_to(run)).read_bytes() == path.read_bytes()
    monkeypatch.setattr(remote.ObjectStore, "files", lambda _: {"recipe.yaml": 1, "a/../../outside": 1})
    with raises("results-path-unsafe"):
        download(f"s3://results/{name}", tmp_path / "elsewhere")
    assert not (tmp_path / "elsewhere").exists()


def test_unreachable_store_does_not_block_training(tmp_path: Path, bucket, caplog, monkeypatch) -> None:
    from paceline.system.logs import log

    log.propagate = True
    monkeypatch.setattr("paceline.checkpoint.results._RETRIES", 0)
    run = _folder(tmp_path / "run")
    results = Results(run, "s3://results", "top1", every=1000)
    bucket.server.stop()
    assert not results._try()
    assert "uploads to s3://results/run are delayed" in caplog.text
    bucket.server.start()
    (run / "metrics.jsonl").write_text("1\n2\n")
    results.close()
    assert "uploads to s3://results/run continue after" in caplog.text
    assert bucket.get_object(Bucket="results", Key="run/metrics.jsonl")["Body"].read() == b"1\n2\n"
