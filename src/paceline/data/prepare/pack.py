"""Writes a source as shards. An interrupted preparation resumes, and its result is byte-identical.

Shard n of a split contains the samples from n * 2048 on, for all variants at once. A shard is complete once its part,
a small JSON file that describes it, exists. assemble.py turns the parts into the index and writes dataset.json last.
"""

import hashlib
import json
import shutil
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from rich.progress import Progress, Task, TaskID

from paceline.data import codec
from paceline.data.description import DESCRIPTION, FORMAT, LEFT_OUT, MAX_CLASSES, read_json, shard_name
from paceline.data.pillow import MAX_BYTES, check_size
from paceline.data.prepare.assemble import PARTS, assemble
from paceline.data.prepare.convert import Variant, convert_as
from paceline.data.prepare.isolated import Isolated
from paceline.data.prepare.raw import RawDataset, Sample
from paceline.errors import UserError
from paceline.system.files import FolderLock, make_folder, replacing, size_text, write_json
from paceline.system.logs import console
from paceline.system.progress_bar import OneLineProgress, compact
from paceline.system.untrusted import Unreadable
from paceline.system.wording import counted

SHARD_SAMPLES = 2048
_MAX_PENDING_BYTES = 1 << 30  # of files in memory
_LOG_SECONDS = 30.0  # between lines of progress without a terminal


def prepare(
    source: RawDataset, out: Path, variants: list[Variant], workers: int, allow_empty_classes: bool = False
) -> None:
    """Write all splits and variants of a source to a folder."""
    plan = {
        "name": source.name,
        "classes": len(source.classes),
        "source": source.identity,
        "variants": {variant.name: vars(variant) for variant in variants},
        "format": FORMAT,
    }
    if not 2 <= len(source.classes) <= MAX_CLASSES:
        raise UserError(
            "too-few-classes" if len(source.classes) < 2 else "too-many-classes",
            f"{source.name} has {len(source.classes)} classes. It must have 2 to {MAX_CLASSES:,}.",
        )
    try:
        make_folder(out)
        lock = FolderLock(out)
    except OSError as error:
        message = f"--out {out} is not writable ({error.strerror}). Choose another folder."
        raise UserError("output-not-writable", message, path=out) from None
    try:
        if _finished(out, plan):
            console.print(f"{out} is already prepared; nothing to do (remove it to prepare it again)")
            return
        _check_disk_space(source, out, variants)
        _begin(out, plan)
        for shards in (out / variant.name / split for variant in variants for split in source.splits):
            for incomplete in shards.glob(".shard-*"):  # left by a kill; nobody else holds the lock
                incomplete.unlink()
        convert = Isolated(convert_as, [vars(variant) for variant in variants])
        with _bar() as bar, convert, ThreadPoolExecutor(workers) as pool:
            for split in source.splits:
                _write_split(source, split, out, variants, Work(convert, pool, workers), bar)
        assemble(source, out, variants, plan, allow_empty_classes)
    except KeyboardInterrupt:
        console.print(f"\n{out} is not finished; run the same command again to resume")
        raise
    finally:
        lock.release()


def _finished(out: Path, plan: dict[str, Any]) -> bool:
    try:
        description = read_json(out)
    except FileNotFoundError:
        return False
    except (OSError, ValueError):
        description = None
    if not isinstance(description, dict) or description.get("prepared") != json.loads(json.dumps(plan)):
        message = f"--out {out} already contains other data ({DESCRIPTION}). Choose another folder."
        raise UserError("output-has-other-data", message, path=out)
    return True


def _begin(out: Path, plan: dict[str, Any]) -> None:
    path = out / PARTS / "plan.json"
    if any((out / PARTS).glob("*/*.json")):  # at least one shard is done
        if json.loads(path.read_text(encoding="utf-8")) != json.loads(json.dumps(plan)):
            raise UserError(
                "unfinished-preparation",
                f"--out {out} contains an unfinished preparation with other options or of another source. "
                "Use the same options and source to resume it, or remove the folder.",
                path=out,
            )
        console.print(f"{out} is not finished; resuming")
    else:
        path.parent.mkdir(exist_ok=True)
        write_json(path, plan)


def _check_disk_space(source: RawDataset, out: Path, variants: list[Variant]) -> None:
    """Raise if the estimated size exceeds the free space, rather than fail after hours."""
    if any(size is None for size in source.bytes.values()):
        return
    total = sum(size or 0 for size in source.bytes.values())
    needed = int(sum(_estimate(source, variant, total) for variant in variants))
    present = sum(path.stat().st_size for path in out.rglob("*.pcl"))
    free = shutil.disk_usage(out).free
    if needed > free + present:
        raise UserError(
            "disk-full",
            f"--out {out} has {size_text(free)} free, but about {size_text(needed)} are needed. "
            "Choose another disk, or smaller images (--max-side).",
            path=out,
        )


def _estimate(source: RawDataset, variant: Variant, total: int) -> float:
    whole = 1.7 * total
    if variant.name == "original" or any(size is None for size in source.sizes.values()):
        return whole
    pixels = 0.75 * variant.max_side**2 if variant.max_side else 4 / 3 * variant.short_side**2
    return min(whole, sum(size or 0 for size in source.sizes.values()) * pixels * 0.5)


def _bar() -> Progress:
    def count(task: Task) -> tuple[str, str]:
        images = task.fields["images"]
        return counted(images, "image"), compact(images)

    return OneLineProgress(count, lambda task: (task.fields["rate"],), console)


def _write_split(
    source: RawDataset,
    split: str,
    out: Path,
    variants: list[Variant],
    work: "Work",
    bar: Progress,
) -> None:
    task = bar.add_task(split, total=source.bytes[split], images=0, rate="")
    logged = time.monotonic()
    samples = source.splits[split]()
    images = made = number = 0
    while chunk := _next_chunk(samples):
        part = out / PARTS / split / f"{number:05d}.json"
        if _is_done(part, out, split, variants):
            for sample in chunk:
                images += 1
                bar.update(task, advance=sample.size, images=images)
        else:
            entries = []
            with ExitStack() as stack:
                files = [_ShardWriter(out / variant.name / split / shard_name(number), stack) for variant in variants]
                for sample, outcome in work.converted(chunk, source.parallel):
                    entries.append(_entry(sample, outcome, files))
                    images, made = images + 1, made + 1
                    elapsed = bar.tasks[task].elapsed or 1e-9
                    bar.update(task, advance=sample.size, images=images, rate=f"{made / elapsed:,.0f} images/s")
                    if not console.is_terminal and time.monotonic() - logged > _LOG_SECONDS:
                        logged = time.monotonic()
                        speed = f"{made / elapsed:,.0f} images/s, {_left(bar, task)}"
                        console.print(f"{split}: {counted(images, 'image')}, {speed}")
                digests = [file.close() for file in files]
            make_folder(part.parent)
            write_json(part, {"entries": entries, "shards": digests})
        number += 1
    bar.update(task, total=bar.tasks[task].completed)


def _left(bar: Progress, task: TaskID) -> str:
    seconds = bar.tasks[task].time_remaining
    return "time left unknown" if seconds is None else f"{seconds / 60:,.0f} min left"


def _next_chunk(samples: Iterator[Sample]) -> "_Chunk | None":
    first = next(samples, None)
    return None if first is None else _Chunk(first, samples)


class _Chunk:
    """The samples of one shard, read lazily: archives can only be read sequentially."""

    def __init__(self, first: Sample, rest: Iterator[Sample]):
        self._first, self._rest = first, rest

    def __iter__(self) -> Iterator[Sample]:
        yield self._first
        yield from islice(self._rest, SHARD_SAMPLES - 1)


def _is_done(part: Path, out: Path, split: str, variants: list[Variant]) -> bool:
    if not part.exists():
        return False
    shards = json.loads(part.read_text(encoding="utf-8"))["shards"]
    paths = [out / variant.name / split / shard["file"] for variant, shard in zip(variants, shards, strict=True)]
    return all(
        path.is_file() and path.stat().st_size == shard["bytes"] for path, shard in zip(paths, shards, strict=True)
    )


Outcome = tuple[list[bytes], str] | Unreadable


@dataclass(frozen=True)
class Work:
    """Converts samples in threads, each of which waits for a decoder process."""

    convert: Isolated
    pool: ThreadPoolExecutor
    threads: int

    def converted(self, samples: _Chunk, parallel: bool) -> Iterator[tuple[Sample, Outcome]]:
        """Yield results in the order of the samples, with a bounded number of pending samples and bytes."""
        pending: deque[tuple[Sample, Future[Outcome]]] = deque()
        for sample in samples:
            content = None if parallel or sample.size > MAX_BYTES else sample.read()
            pending.append((sample, self.pool.submit(self._outcome, sample, content)))
            while len(pending) >= 4 * self.threads or self._bytes(pending) > _MAX_PENDING_BYTES:
                ready, future = pending.popleft()
                yield ready, future.result()
        for ready, future in pending:
            yield ready, future.result()

    @staticmethod
    def _bytes(pending: "deque[tuple[Sample, Future[Outcome]]]") -> int:
        return sum(min(sample.size, MAX_BYTES) for sample, _ in pending)

    def _outcome(self, sample: Sample, content: bytes | None) -> Outcome:
        try:
            check_size(sample.size)
            content = sample.read() if content is None else content
            check_size(len(content))  # some sources do not know it in advance
            return self.convert(content)
        except Unreadable as error:
            return error
        except OSError as error:
            return Unreadable(f"cannot be read ({error.strerror or error})")
        except UserError as error:
            raise UserError(error.code, f"{sample.name}: {error}", **error.fields) from None


class _ShardWriter:
    """Writes a shard, under a temporary name until it is complete."""

    def __init__(self, path: Path, stack: ExitStack):
        make_folder(path.parent)
        self._path = path
        self._stack = stack.enter_context(ExitStack())
        self._file: BinaryIO = self._stack.enter_context(replacing(path))
        self._digest = hashlib.sha256()
        self._samples = self._bytes = 0

    def append(self, record: bytes) -> list[int]:
        """Write a record. Returns its offset, length, width and height."""
        offset = self._bytes
        self._write(record)
        self._samples += 1
        return [offset, len(record), *codec.describe(record)[:2]]

    def _write(self, content: bytes) -> None:
        self._file.write(content)
        self._digest.update(content)
        self._bytes += len(content)

    def close(self) -> dict[str, Any]:
        self._write(bytes(codec.OVERRUN))
        self._stack.close()
        return {
            "file": self._path.name,
            "samples": self._samples,
            "bytes": self._bytes,
            "sha256": self._digest.hexdigest(),
        }


def _entry(sample: Sample, outcome: Outcome, files: list[_ShardWriter]) -> dict[str, Any]:
    if isinstance(outcome, Unreadable):
        return {"name": sample.name, "label": sample.label, "remark": f"{LEFT_OUT}{outcome}"}
    records, remark = outcome
    places = [file.append(record) for file, record in zip(files, records, strict=True)]
    return {"name": sample.name, "label": sample.label, "places": places} | ({"remark": remark} if remark else {})
