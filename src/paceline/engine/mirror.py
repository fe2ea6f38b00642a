"""A copy of the run folder on every machine that does not see the leader's, so that training survives the loss of any.

Copies are made when a save is complete, and when ranks have met anew: whichever machine has the newest save gives it to
the others. Machines that share a file system see one folder, and nothing is sent.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from uuid import uuid4

import torch

from paceline.base.files import make_folder, sync
from paceline.base.host import BackgroundThread, host_name
from paceline.checkpoint import store
from paceline.distributed.world import World
from paceline.errors import UserError
from paceline.track.records import RunFolder

_CHUNK = 16 << 20
_REWRITTEN = (".json", ".yaml")  # other files only grow
_PARTIAL = ".copy-"
_OF_A_MACHINE = ("telemetry/", "log.txt", ".", "checkpoints/")  # the last are sent save by save


class Mirror:
    def __init__(self, world: World, folder: RunFolder):
        self._world, self._folder = world, folder
        self._writes = self._lacks_the_folder()
        self.needed = any(world.from_all(self._writes))
        self._sent: dict[str, int] = {}
        self._newest = -1
        self._thread: BackgroundThread | None = None
        self._failed = ""

    def _lacks_the_folder(self) -> bool:
        """Whether this rank has to keep a copy: the first of a machine where a mark of the leader's cannot be seen."""
        folder = self._folder.path

        def mark() -> str:
            make_folder(folder)
            (folder / (name := f".mark-{uuid4().hex}")).touch()
            return name

        name = self._world.on_leader(mark)
        lacking = self._world.local_rank == 0 and not (folder / name).exists()
        self._world.barrier()
        if self._world.is_leader:
            (folder / name).unlink()
        return lacking

    def bring_newest(self) -> None:
        """Before a run is opened: the machine with the newest save gives it to the leader and to all others."""
        if not self.needed:
            return
        own = newest_step(self._folder.checkpoints) if self._world.local_rank == 0 else -1
        steps = self._world.from_all(own)
        giver = max(range(len(steps)), key=lambda rank: (steps[rank], -rank))
        if steps[giver] >= 0:
            self._copy(giver, writes=self._world.is_leader or self._writes)
            self._settle()
            self._newest = steps[giver]

    def follow(self, newest: int, settle: Callable[[], object]) -> None:
        """After the leader has completed a save of step `newest`, which all ranks know by now.

        `settle` waits for a save that is being written: when it is complete, older ones are deleted.
        """
        if self.needed and newest > self._newest:
            settle()
            self._copy(0, self._writes)
            self._newest = newest

    def complete(self) -> None:
        """At the end of a run: whatever has been written since."""
        if self.needed:
            self._copy(0, self._writes)
            self._settle()

    def _copy(self, giver: int, writes: bool) -> None:
        world, checkpoints = self._world, self._folder.checkpoints
        writes = writes and world.rank != giver
        self._settle()
        saves = {path.name for path in store.committed(checkpoints)}
        there = [set(own) for own in world.from_all(sorted(saves) if writes else None) if own is not None]
        to_send = list(self._to_send(set.intersection(*there))) if world.rank == giver else []
        files: list[tuple[str, int, int]]
        kept: list[str]
        files, kept = world.from_rank((to_send, sorted(saves)), giver)
        written: list[Path] = []
        for name, begin, end in files:
            path = self._folder.path / name
            # a whole file replaces the old one later, one that grows is continued
            written.append(path.with_name(f"{_PARTIAL}{path.name}") if begin == 0 else path)
            try:
                self._copy_file(giver, path, written[-1], begin, end, writes)
            except OSError as error:
                _remove_partial(written)  # a full disk needs room for the log, too
                raise UserError(self._refused(name, error)) from None
        if writes:
            old = [checkpoints / name for name in saves - set(kept)]
            names = [name for name, _, _ in files]
            self._thread = BackgroundThread(self._commit, "mirror", (names, written, old))
            self._thread.start()

    def _to_send(self, known: set[str]) -> Iterator[tuple[str, int, int]]:
        """Names and stretches of what the others lack; a save's marker, without which it does not count, last."""
        root = self._folder.path
        for path in sorted(root.rglob("*")):
            name = path.relative_to(root).as_posix()
            if path.is_file() and not path.is_symlink() and not name.startswith(_OF_A_MACHINE):
                size, sent = path.stat().st_size, self._sent.get(name, 0)
                if path.suffix in _REWRITTEN or size < sent:
                    sent = 0
                if size != sent:
                    yield name, sent, size
                self._sent[name] = size
        for save in store.committed(self._folder.checkpoints):
            if save.name not in known:
                for path in store.files_of(save):
                    yield path.relative_to(root).as_posix(), 0, path.stat().st_size

    def _copy_file(self, giver: int, path: Path, partial: Path, begin: int, end: int, writes: bool) -> None:
        if writes:
            path.parent.mkdir(parents=True, exist_ok=True)
        mode = "r+b" if begin and partial.exists() else "wb"
        with (
            path.open("rb") if self._world.rank == giver else nullcontext() as source,
            # closed on an error, too: an open file keeps the space that its removal is to free
            partial.open(mode) if writes else nullcontext() as target,
        ):
            for file in filter(None, (source, target)):
                file.seek(begin)
            for at in range(begin, end, _CHUNK):
                chunk = torch.empty(min(_CHUNK, end - at), dtype=torch.uint8)
                if source:
                    chunk.copy_(torch.frombuffer(bytearray(source.read(len(chunk))), dtype=torch.uint8))
                self._world.broadcast_(chunk, giver)
                if target:
                    target.write(chunk.numpy().tobytes())

    def _commit(self, names: Sequence[str], written: Sequence[Path], old: Sequence[Path]) -> None:
        """In the background: bring copies to disk, in order, before they get their names; then old saves go."""
        name = ""
        try:
            for name, partial in zip(names, written, strict=True):
                path = self._folder.path / name
                sync(partial)
                partial.replace(path)
                sync(path.parent)
            for folder in (self._folder.checkpoints, self._folder.path):
                if folder.exists():
                    sync(folder)
            store.delete(old)
        except OSError as error:
            self._failed = self._refused(name, error)

    def wait(self) -> None:
        """For copies that are being brought to disk."""
        if self._thread:
            self._thread.join()
            self._thread = None

    def _settle(self) -> None:
        self.wait()
        if self._failed:
            raise UserError(self._failed)

    def _refused(self, name: str, error: OSError) -> str:
        path = self._folder.path / name
        return f"{host_name()}: the copy of {path} failed ({error.strerror}); make room there"


def _remove_partial(written: Sequence[Path]) -> None:
    for path in written:
        if path.name.startswith(_PARTIAL):
            path.unlink(missing_ok=True)


def newest_step(checkpoints: Path) -> int:
    """Of the saves that are complete; -1 without any."""
    newest = next(store.committed(checkpoints), None)
    return store.step_of(newest) if newest else -1
