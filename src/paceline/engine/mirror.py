"""A copy of the run folder on every machine that does not see the leader's, so that training survives the loss of any.

Copies are made when a save is complete, and when ranks have met anew: whichever machine has the newest save gives it to
the others. Machines that share a file system see one folder, and nothing is sent.
"""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import torch

from paceline.base.host import host_name
from paceline.base.world import World
from paceline.checkpoint import store
from paceline.errors import UserError
from paceline.track.records import RunFolder

_CHUNK = 16 << 20
_REWRITTEN = (".json", ".yaml")  # other files only grow
_OF_A_MACHINE = ("telemetry/", "log.txt", ".", "checkpoints/")  # the last are sent save by save


class Mirror:
    def __init__(self, world: World, folder: RunFolder):
        self._world, self._folder = world, folder
        self._writes = self._lacks_the_folder()
        self.needed = any(world.from_all(self._writes))
        self._sent: dict[str, int] = {}
        self._newest = -1

    def _lacks_the_folder(self) -> bool:
        """Whether this rank has to keep a copy: the first of a machine where a mark of the leader's cannot be seen."""
        folder = self._folder.path

        def mark() -> str:
            folder.mkdir(parents=True, exist_ok=True)
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

    def _copy(self, giver: int, writes: bool) -> None:
        world, checkpoints = self._world, self._folder.checkpoints
        writes = writes and world.rank != giver
        saves = {path.name for path in store.committed(checkpoints)}
        known = set.intersection(*(there for there in world.from_all(saves if writes else None) if there is not None))
        files, kept = world.from_rank((list(self._to_send(known)) if world.rank == giver else [], saves), giver)
        for name, begin, end in files:
            try:
                self._copy_file(giver, self._folder.path / name, begin, end, writes)
            except OSError as error:
                raise UserError(
                    f"{host_name()}: the copy of {self._folder.path / name} failed ({error.strerror}); make room there"
                ) from None
        for name in saves - kept if writes else ():
            shutil.rmtree(checkpoints / name)

    def _to_send(self, known: set[str]) -> Iterator[tuple[str, int, int]]:
        """Names and stretches of what the others lack; a save's marker, without which it does not count, last."""
        root = self._folder.path
        for save in store.committed(self._folder.checkpoints):
            if save.name not in known:
                for path in store.files_of(save):
                    yield path.relative_to(root).as_posix(), 0, path.stat().st_size
        for path in sorted(root.rglob("*")):
            name = path.relative_to(root).as_posix()
            if path.is_file() and not path.is_symlink() and not name.startswith(_OF_A_MACHINE):
                size, sent = path.stat().st_size, self._sent.get(name, 0)
                if path.suffix in _REWRITTEN or size < sent:
                    sent = 0
                if size != sent:
                    yield name, sent, size
                self._sent[name] = size

    def _copy_file(self, giver: int, path: Path, begin: int, end: int, writes: bool) -> None:
        if writes:
            path.parent.mkdir(parents=True, exist_ok=True)
        source = path.open("rb") if self._world.rank == giver else None
        # a whole file replaces the old one at once; one that grows is continued
        partial = path.with_name(f".copy-{path.name}") if begin == 0 else path
        target = partial.open("r+b" if begin and partial.exists() else "wb") if writes else None
        if source:
            source.seek(begin)
        if target:
            target.seek(begin)
        for at in range(begin, end, _CHUNK):
            chunk = torch.empty(min(_CHUNK, end - at), dtype=torch.uint8)
            if source:
                chunk.copy_(torch.frombuffer(bytearray(source.read(len(chunk))), dtype=torch.uint8))
            self._world.broadcast_(chunk, giver)
            if target:
                target.write(chunk.numpy().tobytes())
        if source:
            source.close()
        if target:
            target.close()
            if begin == 0:
                partial.replace(path)


def newest_step(checkpoints: Path) -> int:
    """Of the saves that are complete; -1 without any."""
    newest = next(store.committed(checkpoints), None)
    return store.step_of(newest) if newest else -1
