"""Hostile archives of hosts: fetching a run folder writes, links, fills and runs nothing outside of it."""

import os
import shutil
import stat
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from paceline.launch import fetching, host_output
from paceline.launch.hosts import Host, HostError
from paceline.launch.job import Job
from paceline.launch.specs import SshSpec

RUN = "runs/j"
SUMMARY = b'{"status": "finished", "step": 7}'


@dataclass(frozen=True)
class Sender(Host):
    """Sends a file instead of an archive."""

    archive: Path = Path()

    def argv(self, command: str) -> list[str]:
        if "tar" in command:
            return ["cat", str(self.archive)]
        return ["printf", "%s\n%s", SUMMARY.decode(), "log.txt telemetry"]


def _entry(name: str, content: bytes = b"", kind: bytes = tarfile.REGTYPE, mode: int = 0o644, **more: object) -> bytes:
    """Return a header and content, which need not be consistent."""
    entry = tarfile.TarInfo(name)
    entry.size, entry.type, entry.mode = len(content), kind, mode
    for key, value in more.items():
        setattr(entry, key, value)
    format = tarfile.PAX_FORMAT if entry.pax_headers else tarfile.GNU_FORMAT
    return entry.tobuf(format, errors="surrogateescape") + content + bytes(-len(content) % 512)


def _link(name: str, to: str, kind: bytes = tarfile.SYMTYPE) -> bytes:
    return _entry(name, kind=kind, linkname=to)


def _pax(**headers: str) -> bytes:
    """Return a file whose extended header overrides its attributes."""
    return _entry(f"{RUN}/pax", b"owned", pax_headers={key.replace("_", "."): value for key, value in headers.items()})


def _attacks(outside: Path) -> dict[str, bytes]:
    good = _entry(f"{RUN}/summary.json", SUMMARY)
    header = _entry("x", kind=tarfile.XHDTYPE, pax_headers={})
    many = b"".join(_entry(f"{RUN}/{number}") for number in range(50))
    return {
        "parent": good + _entry("../../owned", b"owned"),
        "parent below": good + _entry(f"{RUN}/../../../owned", b"owned"),
        "absolute": good + _entry(f"{outside}/owned", b"owned"),
        "another run": good + _entry("runs/other/summary.json", b"owned"),
        "prefix of the name": good + _entry(f"{RUN}-other/summary.json", b"owned"),
        "link to a folder": good + _link(f"{RUN}/l", str(outside)) + _entry(f"{RUN}/l/owned", b"owned"),
        "link to a file": good + _link(f"{RUN}/l", f"{outside}/kept") + _entry(f"{RUN}/l", b"owned"),
        "relative link": good + _link(f"{RUN}/l", "../../..") + _entry(f"{RUN}/l/owned", b"owned"),
        "link as run folder": _link(RUN, str(outside)) + _entry(f"{RUN}/owned", b"owned"),
        "link as job id": good + _link(f"{RUN}/.job", f"{outside}/kept"),
        "hard link": good + _link(f"{RUN}/h", f"{outside}/kept", tarfile.LNKTYPE) + _entry(f"{RUN}/h", b"owned"),
        "device": good + _entry(f"{RUN}/null", kind=tarfile.CHRTYPE, devmajor=1, devminor=3),
        "fifo": good + _entry(f"{RUN}/fifo", kind=tarfile.FIFOTYPE),
        "mode": good + _entry(f"{RUN}/suid", b"#!/bin/sh\n", mode=0o6777),
        "path in a header": good + _pax(path="../../owned"),
        "sparse 0.0": good + _pax(GNU_sparse_major="0", GNU_sparse_minor="0", GNU_sparse_numblocks="99999999"),
        "sparse 1.0": good + _pax(GNU_sparse_major="1", GNU_sparse_minor="0", GNU_sparse_realsize=str(2**60)),
        "sparse": good + _entry(f"{RUN}/sparse", kind=tarfile.GNUTYPE_SPARSE),
        "long name": good + _entry("x", b"n" * 2**20, tarfile.GNUTYPE_LONGNAME) + _entry(f"{RUN}/x"),
        "longest name": good + _entry("x", kind=tarfile.GNUTYPE_LONGNAME, size=2**60),
        "long header": good + _entry("x", kind=tarfile.XHDTYPE, size=2**60),
        "global header": good + _entry("x", b"19 path=../../owned\n", tarfile.XGLTYPE),
        "headers of headers": good + header * 5000,
        "huge file": good + _entry(f"{RUN}/huge", size=2**60),
        "too many files": good + many,
        "name too long for a disk": good + _entry(f"{RUN}/{'n' * 300}", b"x"),
        "file in place of a folder": good + _entry(f"{RUN}/a") + _entry(f"{RUN}/a/b"),
        "folder in place of a file": good + _entry(f"{RUN}/.job/x"),
        "file in place of the run folder": _entry(RUN, b"owned"),
        "garbage": os.urandom(2**20),
        "nothing": b"",
        "cut off": good[:600],
        "no summary": _entry(f"{RUN}/log.txt", b"owned"),
        "escapes": good + _entry(f"{RUN}/\x1b[2J\x07/../../../x", b"owned"),
    }


def _everything(folder: Path) -> dict[str, object]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else path.is_symlink()
        for path in folder.rglob("*")
    }


def _job(runs: Path) -> Job:
    return Job("j", SshSpec(name="j", recipe="data: {}\n", hosts=("attacker",), runs=str(runs)))


def _fetch_error(job: Job) -> str:
    """Fetch the run folder; return the error message, or ""."""
    try:
        fetching.fetch(job)
    except (HostError, OSError) as error:
        return str(error)
    return ""


@pytest.fixture
def sender(tmp_path: Path, monkeypatch) -> Iterator[Sender]:
    monkeypatch.setattr(host_output, "_MAX_FILES", 20)
    made = Sender("attacker", str(tmp_path), tmp_path / "archive")
    monkeypatch.setattr(fetching, "hosts_of", lambda job: {"attacker": made})
    before = os.umask(0o022)
    yield made
    os.umask(before)


def test_archives(tmp_path: Path, sender: Sender, survived) -> None:
    """Fetched like with `paceline fetch`, next to another run of the user."""
    outside, runs = tmp_path / "outside", tmp_path / "home" / "runs"
    for folder in (outside, runs / "other"):
        folder.mkdir(parents=True)
        (folder / "kept").write_text("mine")
    job = _job(runs)
    attacks = _attacks(outside)
    for name, archive in attacks.items():
        sender.archive.write_bytes(archive)
        before = _everything(tmp_path)
        error = _fetch_error(job)
        assert error.isprintable(), name
        if not error:
            kinds = [path.lstat().st_mode for path in (runs / "j").rglob("*")]
            assert all(stat.S_ISREG(kind) or stat.S_ISDIR(kind) for kind in kinds), name
            assert not any(kind & 0o7022 for kind in kinds), name
            shutil.rmtree(runs / "j")
        assert _everything(tmp_path) == before, name
    survived("hostile archives of hosts", len(attacks))


def test_valid_archive_is_fetched_completely(tmp_path: Path, sender: Sender) -> None:
    """Otherwise the other test would prove nothing; trackers leave links in run folders."""
    link = _link(f"{RUN}/wandb", "elsewhere")
    sender.archive.write_bytes(
        _entry(RUN, kind=tarfile.DIRTYPE) + _entry(f"{RUN}/summary.json", SUMMARY) + link + _entry(f"{RUN}/a/b", b"b")
    )
    (folder,) = fetching.fetch(_job(tmp_path / "runs"))
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert found == {"summary.json": SUMMARY, "a/b": b"b", ".job": b"j"}
