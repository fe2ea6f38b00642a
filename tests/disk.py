"""A simulated disk for processes of tests: records writes, simulates power cuts, and fails on demand.

tests/native/disk.c is preloaded into the process and works without root.

A power cut keeps what was synced with fsync: the content of a file, and the entries of a folder. Any part of the rest
may have reached the disk: entries without content, or content that is truncated or zeros.
"""

import os
import random
import shutil
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

_SOURCE = Path(__file__).parent / "native" / "disk.c"
_OPEN, _CREATE, _WRITE, _TRUNCATE, _RENAME, _REMOVE, _MKDIR, _SYNC, _UNSEEN = range(9)
_ENTRY = struct.Struct("=IIIIQQ")


def preloaded(folder: Path, root: Path, **settings: object) -> dict[str, str]:
    """Return variables for a process whose files in `root` are on the simulated disk. `folder` is for the library.

    Settings: room (bytes), errno and failures, as in disk.c; log (a path) to read with `power_cuts`.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        pytest.skip("no C compiler for the simulated disk (install gcc)")
    library = folder / "disk.so"
    flags = ["-O1", "-shared", "-fPIC", "-o", str(library)]
    subprocess.run([compiler, *flags, str(_SOURCE), "-ldl", "-lpthread"], check=True, capture_output=True)
    variables = {f"DISK_{name.upper()}": str(value) for name, value in settings.items()}
    return {"LD_PRELOAD": str(library), "DISK_ROOT": str(root.resolve())} | variables


@dataclass
class Change:
    """One recorded system call."""

    kind: int
    path: Path
    other: Path
    inode: int
    offset: int
    data: bytes


def changes(log: Path) -> list[Change]:
    """Return the recorded changes of a log."""
    content, found, at = log.read_bytes(), [], 0
    while at < len(content):
        kind, path, other, length, inode, offset = _ENTRY.unpack_from(content, at)
        at += _ENTRY.size
        words = (content[at : at + path], content[at + path : at + path + other])
        at += path + other
        found.append(Change(kind, *map(Path, map(os.fsdecode, words)), inode, offset, content[at : at + length]))
        at += length
    return found


@dataclass
class _File:
    content: bytearray = field(default_factory=bytearray)
    synced: bytes = b""
    unsynced: list[tuple[int, bytes | None]] = field(default_factory=list)
    """Writes (offset, data) and truncations (size, None)."""

    def change(self, offset: int, data: bytes | None) -> None:
        _apply(self.content, offset, data)
        self.unsynced.append((offset, data))

    def sync(self) -> None:
        self.synced, self.unsynced = bytes(self.content), []

    def after_a_cut(self, survives: "Survival") -> bytes:
        content = bytearray(self.synced)
        kept = survives.of(self.unsynced)
        for offset, data in kept:
            _apply(content, offset, data)
        if kept and kept[-1][1] and survives.torn:
            offset, data = kept[-1]
            begin = survives.generator.randrange(len(data))
            content[offset + begin :] = bytes(len(data) - begin) if survives.generator.random() < 0.5 else b""
        return bytes(content)


def _apply(content: bytearray, offset: int, data: bytes | None) -> None:
    if data is None:
        del content[offset:]
    if len(content) < offset:
        content.extend(bytes(offset - len(content)))
    if data:
        content[offset : offset + len(data)] = data


@dataclass
class _Folder:
    entries: "dict[str, _File | _Folder]" = field(default_factory=dict)
    synced: "dict[str, _File | _Folder]" = field(default_factory=dict)
    unsynced: "list[dict[str, _File | _Folder | None]]" = field(default_factory=list)
    """Names that were added or (None) removed; each change is atomic."""

    def change(self, names: "dict[str, _File | _Folder | None]") -> None:
        _rename(self.entries, names)
        self.unsynced.append(names)

    def sync(self) -> None:
        self.synced, self.unsynced = dict(self.entries), []

    def after_a_cut(self, survives: "Survival") -> "dict[str, _File | _Folder]":
        entries = dict(self.synced)
        for names in survives.of(self.unsynced):
            _rename(entries, names)
        return entries


def _rename(entries: "dict[str, _File | _Folder]", names: "dict[str, _File | _Folder | None]") -> None:
    for name, node in names.items():
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node


@dataclass
class Survival:
    """Which part of the unsynced data survives: nothing, everything, or some, with torn writes."""

    surviving: str
    generator: random.Random

    @property
    def torn(self) -> bool:
        return self.surviving == "some"

    def of(self, unsynced: list) -> list:
        counts = {"nothing": 0, "everything": len(unsynced)}
        return unsynced[: counts.get(self.surviving, self.generator.randint(0, len(unsynced)))]


class Disk:
    """The state of a recorded disk after some of its changes."""

    def __init__(self, root: Path):
        self._root, self._top = root.resolve(), _Folder()
        self._inodes: dict[int, _File | _Folder] = {}

    def _folder(self, path: Path) -> _Folder:
        found: _File | _Folder = self._top
        for name in path.relative_to(self._root).parts:
            assert isinstance(found, _Folder)
            found = found.entries[name]
        assert isinstance(found, _Folder), path
        return found

    def do(self, change: Change) -> None:
        path, name = change.path, change.path.name
        assert change.kind != _UNSEEN, f"{path} is memory-mapped, which is not recorded"
        if path == self._root:
            if change.kind == _SYNC:
                self._top.sync()
            return
        folder = None if change.kind in (_WRITE, _TRUNCATE, _SYNC) else self._folder(path.parent)
        if change.kind == _OPEN and folder:
            self._opened(change, folder)
        elif change.kind == _CREATE and folder:
            self._inodes[change.inode] = node = _File()
            folder.change({name: node})
        elif change.kind == _MKDIR and folder:
            folder.change({name: _Folder()})
        elif change.kind == _REMOVE and folder:
            folder.change({name: None})
        elif change.kind == _RENAME and folder:
            node = folder.entries[name]
            assert change.other.parent == path.parent, "only renames within a folder are simulated"
            folder.change({name: None, change.other.name: node})
        elif change.kind == _SYNC:
            self._inodes[change.inode].sync()
        else:
            node = self._inodes[change.inode]
            assert isinstance(node, _File)
            node.change(change.offset, None if change.kind == _TRUNCATE else change.data)

    def _opened(self, change: Change, folder: _Folder) -> None:
        """Record the inode of a folder. A file with a new name was renamed by a direct system call."""
        name, known = change.path.name, self._inodes.get(change.inode)
        if folder.entries.get(name) is known and known is not None:
            return
        if isinstance(folder.entries.get(name), _Folder):
            self._inodes[change.inode] = folder.entries[name]
            return
        old = next(old for old, node in folder.entries.items() if node is known)
        folder.change({old: None, name: folder.entries[old]})

    def leave(self, target: Path, survives: Survival) -> None:
        """Write what survives a power cut to a new folder."""
        _leave(self._top, target, survives)


def _leave(folder: _Folder, target: Path, survives: Survival) -> None:
    target.mkdir(parents=True)
    for name, node in folder.after_a_cut(survives).items():
        if isinstance(node, _Folder):
            _leave(node, target / name, survives)
        else:
            (target / name).write_bytes(node.after_a_cut(survives))


@dataclass(frozen=True)
class Cut:
    """A power cut after `number` changes; see Survival for `surviving`."""

    number: int
    surviving: str
    disk: Disk = field(compare=False, repr=False)

    def leave(self, target: Path) -> Path:
        """Write the folder after the cut to `target` and return it. Call this before the next cut."""
        shutil.rmtree(target, ignore_errors=True)
        self.disk.leave(target, Survival(self.surviving, random.Random(f"{self.number} {self.surviving}")))
        return target


def power_cuts(root: Path, log: Path, num_random: int = 0) -> Iterator[Cut]:
    """Yield cuts before every fsync, at `num_random` other places and at the end, each with three kinds of survival."""
    done = changes(log)
    places = {number for number, change in enumerate(done) if change.kind == _SYNC} | {len(done)}
    places |= set(random.Random(0).sample(range(len(done)), min(num_random, len(done))))
    disk = Disk(root)
    for number in range(len(done) + 1):
        if number in places:
            yield from (Cut(number, surviving, disk) for surviving in ("nothing", "some", "everything"))
        if number < len(done):
            disk.do(done[number])
