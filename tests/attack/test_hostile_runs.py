"""Corrupt, truncated and untrusted recipes and run folders, read by every command."""

import json
import os
import random
import re
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from made_runs import make_run

from attack.run_folders import FILES, HOSTILE_NUMBERS, check_polite, commands, sealed
from paceline.analysis.compare import compare
from paceline.analysis.read import read
from paceline.analysis.run import LoggedRun
from paceline.analysis.tables import as_json


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run as the engine writes it, with checksums."""
    return sealed(make_run(tmp_path / "runs", "one", ranks=2))


def _reported(run: LoggedRun) -> tuple[str, list[str]]:
    """Return what a report says about a run, and its notes."""
    content = json.loads(as_json(compare([run])))
    return json.dumps(content["runs"]) + json.dumps(run.facts, sort_keys=True), run.notes


def test_flipped_bit_is_reported_or_changes_nothing(run: Path, survived) -> None:
    figures, notes = _reported(read(run))
    assert notes == []
    generator, count = random.Random(3), 0
    for name in FILES:
        original = (run / name).read_bytes()
        for _ in range(80):
            bit = generator.randrange(8 * len(original))
            changed = bytearray(original)
            changed[bit // 8] ^= 1 << bit % 8
            (run / name).write_bytes(changed)
            now, found = _reported(read(run))
            # a corrupt sample of telemetry only leaves out one second
            assert now == figures or found or name.startswith("telemetry"), (name, bit)
            count += 1
        (run / name).write_bytes(original)
    survived("flipped bits in run folders", count)


def test_truncated_files_with_every_command(here, run: Path, tmp_path: Path, survived) -> None:
    other, count = make_run(tmp_path / "others", "other"), 0
    for name in FILES:
        original = (run / name).read_bytes()
        for length in (0, len(original) // 2, len(original) - 2):
            (run / name).write_bytes(original[:length])
            for words in commands(run, other):
                check_polite(here(*words))
                count += 1
        (run / name).write_bytes(original)
    survived("truncated files of run folders, by command", count)


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(10**11)


def _link_out(path: Path) -> None:
    outside = path.parent.parent.parent / f"outside-{path.name}"
    outside.write_text("secret\n")
    path.symlink_to(outside)


ODD_FILES: dict[str, Callable[[Path], None]] = {
    "FIFO": _fifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "huge file": _huge,
    "link out": _link_out,
    "link to itself": lambda path: path.symlink_to(path.name),
    "folder": Path.mkdir,
}


def test_fifos_devices_links_and_huge_files_with_every_command(here, run: Path, tmp_path: Path, survived) -> None:
    other, count = make_run(tmp_path / "others", "other"), 0
    for name in (*FILES, "log.txt", "telemetry/host-0.txt", "README.md"):
        kept = (run / name).read_bytes() if (run / name).exists() else None
        for make in ODD_FILES.values():
            (run / name).unlink(missing_ok=True)
            make(run / name)
            for words in commands(run, other):
                answer = here(*words)
                check_polite(answer)
                assert "secret" not in answer.stdout
                count += 1
            assert not any("secret" in path.read_text() for path in tmp_path.glob("logbook/**/*.md"))
            shutil.rmtree(run / name) if (run / name).is_dir() else (run / name).unlink()
        if kept is not None:
            (run / name).write_bytes(kept)
    survived("FIFOs, devices, links and huge files, by command", count)


@pytest.mark.parametrize("name", ["metrics.jsonl", "log.txt", "recipe.yaml", "telemetry"])
def test_training_does_not_follow_links_out_of_the_run_folder(
    here, run: Path, tmp_path: Path, survived, name: str
) -> None:
    outside = tmp_path / "outside"
    if name == "telemetry":
        shutil.move(run / name, outside)
    else:
        outside.write_bytes((run / name).read_bytes() if (run / name).exists() else b"")
        (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(outside)
    before = outside.read_bytes() if outside.is_file() else sorted(outside.iterdir())
    answer = here("train", "--resume", run)
    check_polite(answer)
    assert name in answer.stderr
    assert "[run-folder-unsafe]" in answer.stderr
    assert (outside.read_bytes() if outside.is_file() else sorted(outside.iterdir())) == before
    survived("links out of the run folder", 1)


def test_fifo_does_not_block_training(here, run: Path, survived) -> None:
    for name in ("metrics.jsonl", "environment.json", "log.txt"):
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)
        answer = here("train", "--resume", run)
        check_polite(answer)
        assert f"{name}: " in answer.stderr
        assert "[run-folder-unsafe]" in answer.stderr
        (run / name).unlink()
    survived("FIFOs in the run folder of a training", 3)


_LAUGHS = "a: &a [x, x]\n" + "".join(f"{b}: &{b} [{', '.join(['*' + a] * 9)}]\n" for a, b in pairwise("abcdefghij"))
HOSTILE_YAML = {
    "billion laughs": _LAUGHS,
    "merged laughs": "a: &a {x: 1}\n" + "".join(f"{b}: &{b} {{<<: [*{a}, *{a}]}}\n" for a, b in pairwise("abcdefghij")),
    "alias of itself": "name: &a [*a]\n",
    "deeply nested list": "name: " + "[" * 100_000,
    "deeply nested mapping": "name: " + "{a: " * 5000,
    "deeply nested keys": "? " * 5000,
    "100,000 digits": "name: a\nseed: " + "9" * 100_000,
    "hexadecimal digits": "name: a\nseed: 0x" + "f" * 100_000,
    "large number": "name: a\nseed: " + "9" * 4000,
    "numbers that are not finite": "name: a\nseed: .nan\noptim: {lr: .inf, momentum: -1.0e+400}\n",
    "an empty number": 'name: a\nseed: !!int ""\n',
    "a date": "name: 2026-01-01\nseed: !!timestamp x\n",
    "code": "name: !!python/object/apply:os.system ['touch owned']\n",
    "many keys": "".join(f"k{number}: 1\n" for number in range(10_000)),
    "keys that are numbers": "1: 2\nname: a\n",
    "keys that are lists": "? [1]\n: 2\n",
    "groups that are strings": "name: a\noptim: x\ndata: [1]\nmodel: 5\ntrain: {duration: {a: 1}}\n",
    "several documents": "name: a\n---\nname: b\n",
    "control characters": 'name: "a\\x1b[2J\\u202e"\nmodel: {name: "\\x9b31m\\r"}\n',
    "not UTF-8": b"name: \xff\xfe\n",
    "zeros": bytes(10_000),
    "empty": "",
}


def test_hostile_yaml_with_every_command(here, run: Path, tmp_path: Path, survived) -> None:
    other, count = make_run(tmp_path / "others", "other"), 0
    for text in HOSTILE_YAML.values():
        (run / "recipe.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
        for words in (*commands(run, other), ("train", str(run / "recipe.yaml")), ("plan", str(run / "recipe.yaml"))):
            answer = here(*words)
            check_polite(answer)
            assert answer.returncode == 1 or words[0] != "train"
            count += 1
    assert not (tmp_path / "owned").exists()
    survived("hostile YAML, by command", count)


_RECORD = '{"kind": "train", "step": 50, "steps": 10, "images": 10, "seconds": {"data": 1, "compute": 1}, "loss": 1}'


def test_invalid_numbers_are_left_out_and_counted(run: Path, survived) -> None:
    figures, _ = _reported(read(run))
    original = (run / "metrics.jsonl").read_bytes()
    fields = ('"step": 50', '"steps": 10', '"images": 10', '"data": 1', '"compute": 1')
    count = 0
    for field in fields:
        for number in HOSTILE_NUMBERS:
            line = _RECORD.replace(field, f"{field.partition(':')[0]}: {number}")
            (run / "metrics.jsonl").write_bytes(original + line.encode() + b"\n")
            now, notes = _reported(read(run))
            assert now == figures
            assert "1 corrupt line was left out of metrics.jsonl" in notes
            count += 1
    survived("invalid numbers in records", count)


def test_invalid_numbers_in_other_files_with_every_command(here, run: Path, tmp_path: Path, survived) -> None:
    other, count = make_run(tmp_path / "others", "other"), 0
    fields = {
        "summary.json": ("train_seconds", "global_batch", "parameters", "total_steps", "best", "ranks", "seconds"),
        "environment.json": ("ranks", "first_step", "price", "hardware", "host_of_rank", "started"),
        "telemetry/host-0.jsonl": ("time", "cpu_percent", "memory_bytes", "gpus"),
    }
    for file, names in fields.items():
        original = (run / file).read_text()
        for index, name in enumerate(names):
            for number in HOSTILE_NUMBERS[index % 2 :: 2]:
                inner = re.sub(r', "crc": "\w+"', "", original)
                if re.search(rf'"{name}":', inner):
                    value = r'("[^"]*"|\[[^]]*\]|\{[^}]*\}|[^,}\n]+)'
                    text = re.sub(rf'"{name}": {value}', f'"{name}": {number}', inner)
                else:
                    text = inner.replace("{", f'{{"{name}": {number}, ', 1)
                (run / file).write_text(text)
                words = list(commands(run, other))
                for command in words[count % 3 :: 3]:
                    check_polite(here(*command))
                    count += 1
        (run / file).write_text(original)
    survived("invalid numbers in other files, by command", count)
