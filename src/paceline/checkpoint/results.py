"""A copy of the run folder in an object store, made while the run goes on, and brought back to resume it.

Uploads go on in a thread of their own. They are repeated until they succeed, and compared with what the store says it
has; training never waits for them. A checkpoint counts there only when its marker is, which goes last.
"""

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.checkpoint import store
from paceline.checkpoint.verified import COMMIT
from paceline.errors import UserError
from paceline.system.files import make_folder, replacing
from paceline.system.host import BackgroundThread
from paceline.system.logs import log
from paceline.system.remote import shown

_EVERY = 10.0
_RANK_TIMEOUT = 600.0
_RETRIES = 3  # the next pass tries again
_BEST = "checkpoints/best"


def _open(place: str) -> Any:
    try:
        import obstore
    except ImportError:
        raise UserError(f"{place}: object stores need obstore; pip install 'paceline[s3]'") from None
    try:
        return obstore.store.from_url(
            place.rstrip("/"), client_options={"allow_http": True}, retry_config={"max_retries": _RETRIES}
        )
    except Exception as error:  # obstore's own exceptions have no common base but this
        raise UserError(f"{shown(place)} is no place for results ({brief(error)}); write s3://BUCKET/PREFIX") from None


class Results:
    """Of the leader: everything. Of the first rank on another machine: what is known only there."""

    def __init__(self, folder: Path, place: str, best_metric: str, only: str = "", every: float = _EVERY):
        self._folder, self._metric, self._only = folder, best_metric, only
        self._place = f"{place.rstrip('/')}/{folder.name}"
        self._store = _open(self._place)
        self._there: dict[str, tuple[int, float]] = {}
        """Size and time of what has been uploaded, by name."""
        self._best, self._failed_since = "", 0.0
        self._tags_are_checksums = True
        if not only:
            self._begin()
        self._stop, self._every = threading.Event(), every
        self._thread = BackgroundThread(self._work, "results")
        self._thread.start()

    def _begin(self) -> None:
        """What an earlier start of this run has left there; another run's is not to be mixed with it.

        Where nothing can be lost yet, a store that cannot be used is told at once.
        """
        import obstore

        begun = next(store.committed(self._folder / "checkpoints"), None) is not None
        try:
            found = [entry["path"] for batch in obstore.list(self._store) for entry in batch]
            there = bytes(obstore.get(self._store, "environment.json").bytes()) if "environment.json" in found else b""
            if not found:
                obstore.put(self._store, "recipe.yaml", (self._folder / "recipe.yaml").read_bytes())
        except Exception as error:  # obstore's own exceptions have no common base but this
            if begun:
                log.warning("results to %s wait: %s", shown(self._place), brief(error))
                return
            raise UserError(
                f"results cannot go to {shown(self._place)} ({brief(error)}); check the address and the AWS_* "
                "variables, which launched jobs get through --pass"
            ) from None
        if there and _first_start(there) != _first_start((self._folder / "environment.json").read_bytes()):
            raise UserError(
                f"{shown(self._place)} holds another run; choose another --name or --results, or go on with it: "
                f"--resume {shown(self._place)}"
            )
        self._there = {name: (-1, 0.0) for name in found if name.startswith("checkpoints/step-")}
        complete = {name.split("/")[1] for name in found if name.endswith(f"/{COMMIT}")}
        here = {path.name for path in store.committed(self._folder / "checkpoints")}
        # of checkpoints that are here what is not complete there goes again
        for name in [name for name in self._there if name.split("/")[1] in here - complete]:
            del self._there[name]

    def _work(self) -> None:
        while not self._stop.wait(self._every):
            self._try()

    def _try(self) -> bool:
        """One pass over the folder; whether everything is there now."""
        try:
            self._upload()
        except FileNotFoundError:  # an old checkpoint was deleted meanwhile
            return False
        except Exception as error:  # whatever the store or the network says: later
            if not self._failed_since:
                log.warning("results to %s wait: %s", shown(self._place), brief(error))
            self._failed_since = self._failed_since or time.monotonic()
            return False
        if self._failed_since:
            log.info("results to %s go on after %.0f s", shown(self._place), time.monotonic() - self._failed_since)
            self._failed_since = 0.0
        return True

    def _upload(self) -> None:
        import obstore

        checkpoints = [path.name for path in store.committed(self._folder / "checkpoints")] if not self._only else []
        for path in self._changed(checkpoints):
            name = path.relative_to(self._folder).as_posix()
            state = path.stat()
            content = path.read_bytes()
            answer = obstore.put(self._store, name, content)
            self._verify(name, content, answer)
            self._there[name] = (state.st_size, state.st_mtime)
        if not self._only:
            self._name_best()
            self._remove_old(set(checkpoints))

    def _changed(self, checkpoints: list[str]) -> Iterator[Path]:
        """Records first: a checkpoint must find those of its steps, whenever the uploads end."""
        for path in sorted((self._folder / self._only).rglob("*")):
            name = path.relative_to(self._folder).as_posix()
            if path.is_symlink() or not path.is_file() or name.startswith("checkpoints/") or path.name.startswith("."):
                continue
            state = path.stat()
            if self._there.get(name) != (state.st_size, state.st_mtime):
                yield path
        for name in checkpoints:
            folder = self._folder / "checkpoints" / name
            for path in store.files_of(folder):
                if path.relative_to(self._folder).as_posix() not in self._there:
                    yield path

    def _verify(self, name: str, content: bytes, answer: Any) -> None:
        """Of a file that went in one piece the store tells the MD5; of others at least the size."""
        import obstore

        tag = str(answer.get("e_tag") or "").strip('"')
        if len(tag) == 32 and "-" not in tag and self._tags_are_checksums:
            if tag == hashlib.md5(content, usedforsecurity=False).hexdigest():
                return
            # encrypted buckets have other tags
            if bytes(obstore.get(self._store, name).bytes()) != content:
                raise OSError(f"{name} arrived corrupt")
            self._tags_are_checksums = False
        elif obstore.head(self._store, name)["size"] != len(content):
            raise OSError(f"{name} arrived cut off")

    def _name_best(self) -> None:
        """The best checkpoint also has a name that does not change."""
        import obstore

        best = store.best(self._folder / "checkpoints", self._metric)
        if best is None or best.folder.name == self._best:
            return
        for path in store.files_of(best.folder):
            obstore.copy(self._store, f"checkpoints/{best.folder.name}/{path.name}", f"{_BEST}/{path.name}")
        self._best = best.folder.name

    def _remove_old(self, checkpoints: set[str]) -> None:
        import obstore

        old = [
            name for name in self._there if name.startswith("checkpoints/") and name.split("/")[1] not in checkpoints
        ]
        for name in sorted(old, key=lambda name: not name.endswith(COMMIT)):  # without it none counts
            if name in self._there:
                obstore.delete(self._store, name)
                del self._there[name]

    def close(self) -> None:
        """Upload the rest; the run is over, so that this may take a while, but not for ever."""
        self._stop.set()
        self._thread.join()
        deadline, pause = time.monotonic() + _RANK_TIMEOUT, 1.0
        while not self._try():
            if time.monotonic() + pause > deadline:
                log.warning("results could not be brought to %s; they are in %s", shown(self._place), self._folder)
                return
            time.sleep(pause)
            pause = min(30.0, 2 * pause)


def brief(error: Exception) -> str:
    """What a store's client says: the cause is often at the end."""
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else f"{text[:120]} ... {text[-160:]}"


def _first_start(environment: bytes) -> object:
    """What tells a run from others: when and where it began."""
    try:
        return json.loads(environment)["starts"][0]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        return None


def bring(place: str, runs: Path) -> Path:
    """A run folder from an object store, to be resumed here."""
    import obstore

    source = _open(place)
    name = place.rstrip("/").rpartition("/")[2]
    target = runs / name
    try:
        found = [entry for batch in obstore.list(source) for entry in batch]
    except Exception as error:  # obstore's own exceptions have no common base but this
        raise UserError(
            f"{shown(place)} cannot be read ({brief(error)}); check the address and the AWS_* variables"
        ) from None
    if not any(entry["path"] == "recipe.yaml" for entry in found):
        raise UserError(f"{shown(place)} holds no run: there is no recipe.yaml")
    there = {entry["path"].split("/")[1] for entry in found if entry["path"].endswith(f"/{COMMIT}")}
    newest = next(store.committed(target / "checkpoints"), None)
    if newest and newest.name >= max(there - {"best"}, default=""):
        return target  # what is here is as new
    for entry in sorted(found, key=lambda entry: entry["path"].endswith(COMMIT)):
        path = target / entry["path"]
        if ".." in path.parts or not path.is_relative_to(target):
            raise UserError(f"{shown(place)} {entry['path']!r} leads out of the run folder; remove it there")
        if entry["path"].startswith(_BEST) or (path.is_file() and path.stat().st_size == entry["size"]):
            continue
        make_folder(path.parent)
        with replacing(path) as file:
            file.write(bytes(obstore.get(source, entry["path"]).bytes()))
    return target
