"""Fetching the run folder of a job from its nodes, and the end of a job on this machine."""

import json
from pathlib import Path

import pytest
from conftest import raises
from fake_backend import is_marked_stopped, saved_job

from paceline.errors import NoRunFolder
from paceline.launch import job as jobs
from paceline.launch.backends import local
from paceline.launch.hosts import Host, HostError


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))


def test_clean_up_does_not_mark_the_job_as_stopped(tmp_path: Path) -> None:
    job = saved_job(tmp_path, backend="local")
    local.clean_up(job)
    assert not is_marked_stopped(job)


def test_fetch_without_run_folder_or_reachable_hosts(tmp_path: Path, monkeypatch) -> None:
    job = saved_job(tmp_path, backend="local")
    for name in job.spec.hosts:
        (jobs.folder_of(job.id) / name).mkdir()
    with raises("no-run-folder", NoRunFolder):
        local.fetch(job)

    def unreachable(host: Host, *_: object, **__: object) -> None:
        raise host.error("host-unreachable", "no route")

    monkeypatch.setattr(Host, "run", unreachable)
    with raises("nodes-unreachable", HostError) as caught:
        local.fetch(job)
    assert "n1: no route; n2: no route" in str(caught.value)


def test_run_folder_without_telemetry_is_fetched(tmp_path: Path) -> None:
    job = saved_job(tmp_path, backend="local")
    for number, name in enumerate(job.spec.hosts):
        folder = jobs.folder_of(job.id) / name / "runs" / "j"
        folder.mkdir(parents=True)
        (folder / "summary.json").write_text(json.dumps({"status": "running", "step": number}, indent=1))
    assert json.loads((local.fetch(job)[0] / "summary.json").read_text())["step"] == 1


class _SlowHost(Host):
    """Sends the padding of an archive only after the rest has been read."""

    def argv(self, command: str) -> list[str]:
        return ["sh", "-c", f"{command} > all.tar; head -c 10240 all.tar; sleep 0.2; tail -c +10241 all.tar"]


def test_archive_is_read_to_its_end(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    content = bytes(18 * 512)  # fills a record, with its header and the first of the two empty blocks at the end
    (tmp_path / "file").write_bytes(content)
    (tmp_path / "here").mkdir()
    _SlowHost("slow", str(tmp_path)).fetch(["file"], tmp_path / "here")
    assert (tmp_path / "here" / "file").read_bytes() == content
