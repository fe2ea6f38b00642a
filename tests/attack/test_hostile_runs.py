"""Recipes and run folders that are flipped, torn, or made by strangers, before every command that reads them."""

import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from made_runs import make_run

from paceline.logbook.compare import compare
from paceline.logbook.read import Run, read
from paceline.logbook.tables import as_json
from paceline.track.records import RunFolder
from paceline.track.sealed import seal, write_sealed

FILES = ("recipe.yaml", "environment.json", "metrics.jsonl", "summary.json", "telemetry/host-0.jsonl")
READERS = ("compare", "report", "logbook", "doctor", "runs", "runs --json", "watch --once", "plan")
_CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """As the engine writes one today, checksums included."""
    return _sealed(make_run(tmp_path / "runs", "one", ranks=2))


def _sealed(folder: Path) -> Path:
    for name in ("metrics.jsonl", "telemetry/host-0.jsonl"):
        lines = (folder / name).read_text().splitlines()
        (folder / name).write_bytes(b"".join(seal(json.loads(line)) + b"\n" for line in lines))
    run = RunFolder(folder)
    checksum = run.write_recipe(run.recipe.read_text())
    start = json.loads(run.environment.read_text())["starts"][0]
    write_sealed(run.environment, {"starts": [start | {"recipe_sha256": checksum}]})
    summary = {"train_seconds": 4.0, "images_per_second": 1280.0, "ranks": 2, "total_steps": 40, "step": 40}
    summary |= {"seconds": {"data": 0.1, "compute": 3.7, "sync": 0.2}}
    write_sealed(run.summary, json.loads(run.summary.read_text()) | summary)
    return folder


def _commands(run: Path, other: Path) -> Iterator[tuple[str, ...]]:
    for reader in READERS:
        verb, *options = reader.split()
        if verb == "compare":
            yield verb, str(other), str(run)
        elif verb == "runs":
            yield verb, str(run.parent), *options
        elif verb == "plan":
            yield verb, "digits", "--learn-from", str(run)
        else:
            yield verb, str(run), *options


def _polite(answer: Any) -> None:
    """An answer, or an error for users; no traceback, nothing that a terminal would obey."""
    assert answer.returncode in (0, 1), answer
    assert "Traceback" not in answer.stderr, answer.stderr
    assert answer.returncode == 0 or "paceline: " in answer.stderr, answer
    assert not _CONTROL.search(answer.stdout + answer.stderr), answer


def _told(run: Run) -> tuple[str, list[str]]:
    """What a report says of a run, and what it says of doubts."""
    content = json.loads(as_json(compare([run])))
    return json.dumps(content["runs"]) + json.dumps(run.facts, sort_keys=True), run.notes


def test_a_flipped_bit_is_said_or_changes_nothing(run: Path, survived) -> None:
    figures, notes = _told(read(run))
    assert notes == []
    chance, count = random.Random(3), 0
    for name in FILES:
        sound = (run / name).read_bytes()
        for _ in range(80):
            place = chance.randrange(8 * len(sound))
            changed = bytearray(sound)
            changed[place // 8] ^= 1 << place % 8
            (run / name).write_bytes(changed)
            now, doubts = _told(read(run))
            # a host's sample that cannot be read is one second without a figure
            assert now == figures or doubts or name.startswith("telemetry"), (name, place)
            count += 1
        (run / name).write_bytes(sound)
    survived("flipped bits in run folders", count)


def test_torn_files_before_every_command(here, run: Path, tmp_path: Path, survived) -> None:
    other, count = make_run(tmp_path / "others", "other"), 0
    for name in FILES:
        sound = (run / name).read_bytes()
        for length in (0, len(sound) // 2, len(sound) - 2):
            (run / name).write_bytes(sound[:length])
            for words in _commands(run, other):
                _polite(here(*words))
                count += 1
        (run / name).write_bytes(sound)
    survived("torn files of run folders, by command", count)


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _enormous(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(10**11)


def _link_out(path: Path) -> None:
    outside = path.parent.parent.parent / f"outside-{path.name}"
    outside.write_text("secret\n")
    path.symlink_to(outside)


ODD_FILES: dict[str, Callable[[Path], None]] = {
    "FIFO": _fifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "enormous": _enormous,
    "link out": _link_out,
    "link to itself": lambda path: path.symlink_to(path.name),
    "folder": Path.mkdir,
}


def test_fifos_devices_links_and_enormous_files_before_every_command(here, run: Path, tmp_path: Path, survived) -> None:
    other, count = make_run(tmp_path / "others", "other"), 0
    for name in (*FILES, "log.txt", "telemetry/host-0.txt", "README.md"):
        kept = (run / name).read_bytes() if (run / name).exists() else None
        for make in ODD_FILES.values():
            (run / name).unlink(missing_ok=True)
            make(run / name)
            for words in _commands(run, other):
                answer = here(*words)
                _polite(answer)
                assert "secret" not in answer.stdout
                count += 1
            assert not any("secret" in path.read_text() for path in tmp_path.glob("logbook/**/*.md"))
            shutil.rmtree(run / name) if (run / name).is_dir() else (run / name).unlink()
        if kept is not None:
            (run / name).write_bytes(kept)
    survived("FIFOs, devices, links and enormous files, by command", count)


@pytest.mark.parametrize("name", ["metrics.jsonl", "log.txt", "recipe.yaml", "telemetry"])
def test_training_does_not_write_where_a_link_leads(here, run: Path, tmp_path: Path, survived, name: str) -> None:
    outside = tmp_path / "outside"
    if name == "telemetry":
        shutil.move(run / name, outside)
    else:
        outside.write_bytes((run / name).read_bytes() if (run / name).exists() else b"")
        (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(outside)
    before = outside.read_bytes() if outside.is_file() else sorted(outside.iterdir())
    answer = here("train", "--resume", run)
    _polite(answer)
    assert name in answer.stderr
    assert "leads out of" in answer.stderr
    assert (outside.read_bytes() if outside.is_file() else sorted(outside.iterdir())) == before
    survived("links that lead training out of its folder", 1)


def test_a_fifo_does_not_hold_training_up(here, run: Path, survived) -> None:
    for name in ("metrics.jsonl", "environment.json", "log.txt"):
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)
        answer = here("train", "--resume", run)
        _polite(answer)
        assert f"{name}: it is not a regular file" in answer.stderr
        (run / name).unlink()
    survived("FIFOs before training", 3)


_LAUGHS = "a: &a [x, x]\n" + "".join(f"{b}: &{b} [{', '.join(['*' + a] * 9)}]\n" for a, b in pairwise("abcdefghij"))
HOSTILE_YAML = {
    "billion laughs": _LAUGHS,
    "merged laughs": "a: &a {x: 1}\n" + "".join(f"{b}: &{b} {{<<: [*{a}, *{a}]}}\n" for a, b in pairwise("abcdefghij")),
    "alias of itself": "name: &a [*a]\n",
    "bottomless list": "name: " + "[" * 100_000,
    "bottomless mapping": "name: " + "{a: " * 5000,
    "bottomless keys": "? " * 5000,
    "endless digits": "name: a\nseed: " + "9" * 100_000,
    "hexadecimal digits": "name: a\nseed: 0x" + "f" * 100_000,
    "large number": "name: a\nseed: " + "9" * 4000,
    "numbers that are none": "name: a\nseed: .nan\noptim: {lr: .inf, momentum: -1.0e+400}\n",
    "an empty number": 'name: a\nseed: !!int ""\n',
    "a date": "name: 2026-01-01\nseed: !!timestamp x\n",
    "code": "name: !!python/object/apply:os.system ['touch owned']\n",
    "many keys": "".join(f"k{number}: 1\n" for number in range(10_000)),
    "keys that are numbers": "1: 2\nname: a\n",
    "keys that are lists": "? [1]\n: 2\n",
    "groups that are texts": "name: a\noptim: x\ndata: [1]\nmodel: 5\ntrain: {duration: {a: 1}}\n",
    "several documents": "name: a\n---\nname: b\n",
    "control characters": 'name: "a\\x1b[2J\\u202e"\nmodel: {name: "\\x9b31m\\r"}\n',
    "not UTF-8": b"name: \xff\xfe\n",
    "zeros": bytes(10_000),
    "empty": "",
}


def test_hostile_yaml_before_every_command(here, run: Path, tmp_path: Path, survived) -> None:
    other, count = make_run(tmp_path / "others", "other"), 0
    for text in HOSTILE_YAML.values():
        (run / "recipe.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
        for words in (*_commands(run, other), ("train", str(run / "recipe.yaml")), ("plan", str(run / "recipe.yaml"))):
            answer = here(*words)
            _polite(answer)
            assert answer.returncode == 1 or words[0] != "train"
            count += 1
    assert not (tmp_path / "owned").exists()
    survived("hostile YAML, by command", count)


_RECORD = '{"kind": "train", "step": 50, "steps": 10, "images": 10, "seconds": {"data": 1, "compute": 1}, "loss": 1}'
HOSTILE_NUMBERS = (
    "1e400",
    "-1",
    "NaN",
    "Infinity",
    '"5"',
    "9" * 4000,
    "9" * 5000,
    "[1]",
    "{}",
    "true",
    "null",
    "1e308",
)


def test_impossible_numbers_are_left_out_and_counted(run: Path, survived) -> None:
    figures, _ = _told(read(run))
    sound = (run / "metrics.jsonl").read_bytes()
    fields = ('"step": 50', '"steps": 10', '"images": 10', '"data": 1', '"compute": 1')
    count = 0
    for field in fields:
        for number in HOSTILE_NUMBERS:
            line = _RECORD.replace(field, f"{field.partition(':')[0]}: {number}")
            (run / "metrics.jsonl").write_bytes(sound + line.encode() + b"\n")
            now, notes = _told(read(run))
            assert now == figures
            assert "1 damaged line was left out of metrics.jsonl" in notes
            count += 1
    survived("impossible numbers in records", count)


def test_impossible_numbers_in_other_files_before_every_command(here, run: Path, tmp_path: Path, survived) -> None:
    other, count = make_run(tmp_path / "others", "other"), 0
    fields = {
        "summary.json": ("train_seconds", "global_batch", "parameters", "total_steps", "best", "ranks", "seconds"),
        "environment.json": ("ranks", "first_step", "price", "hardware", "host_of_rank", "started"),
        "telemetry/host-0.jsonl": ("time", "cpu_percent", "memory_bytes", "gpus"),
    }
    for file, names in fields.items():
        sound = (run / file).read_text()
        for index, name in enumerate(names):
            for number in HOSTILE_NUMBERS[index % 2 :: 2]:
                inner = re.sub(r', "crc": "\w+"', "", sound)
                if re.search(rf'"{name}":', inner):
                    value = r'("[^"]*"|\[[^]]*\]|\{[^}]*\}|[^,}\n]+)'
                    text = re.sub(rf'"{name}": {value}', f'"{name}": {number}', inner)
                else:
                    text = inner.replace("{", f'{{"{name}": {number}, ', 1)
                (run / file).write_text(text)
                words = list(_commands(run, other))
                for command in words[count % 3 :: 3]:
                    _polite(here(*command))
                    count += 1
        (run / file).write_text(sound)
    survived("impossible numbers in other files, by command", count)


LOGS = {
    "steps": "Epoch: [{0}][{0}/{0}]\tTime {0} ({0})\tData {0} ({0})\tLoss {0} ({0})\tAcc@1 {0} ({0})\n * Acc@1 {0}\n",
    "facts": "# ranks: {0}\n# global_batch: {0}\n# seconds: {0}\n# train.mixup: {0}\n * Acc@1 5.0\n",
    "arguments": "Namespace(batch_size={0}, workers={0}, lr={0}, epochs={0}, world_size={0})\n * Acc@1 5.0\n",
    "times": "Epoch: [0] Total time: {0}:{0}:{0}\nTraining complete in {0} days, {0}:{0}:{0}\n * Acc@1 5.0\n",
    "dawnbench": "epoch\thours\ttop1Accuracy\ttop5Accuracy\n{0}\t{0}\t{0}\t{0}\n1\t1\t1\t1\n",
    "lightning.csv": "epoch,step,train_loss,val_acc\n{0},{0},{0},{0}\n0,1,1,0.5\n",
}


def test_hostile_logs_of_other_programs(here, run: Path, tmp_path: Path, survived) -> None:
    count = 0
    for name, text in LOGS.items():
        for number in (*HOSTILE_NUMBERS, "9" * 20_000, "(" * 500, "1e-400", "\x1b[2J"):
            (tmp_path / name).write_text(text.format(number))
            _polite(here("compare", run, tmp_path / name))
            count += 1
    events = tmp_path / "events.out.tfevents.1.host"
    chance = random.Random(4)
    for content in (b"", b"\xff" * 100, chance.randbytes(10_000)):
        events.write_bytes(content)
        _polite(here("compare", run, events))
        count += 1
    survived("hostile logs of other programs", count)


HOSTILE = (
    "\x1b[2J\x1b]0;owned\x07",
    "\x9b31m\x85",
    "a\rb\bc\x7f",
    "\u202egnp.exe\u2066",
    "</script><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</title><svg onload=alert(1)>",
    "${title} {{x}} %s %(x)s {0}",
    "[bold red]x[/] [/nothing]",
    "| a | `b` | ](javascript:alert(1))",
)


class _Page(HTMLParser):
    """Elements that a hostile text would add to a page."""

    def __init__(self) -> None:
        super().__init__()
        self.scripts, self.odd = 0, list[str]()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        self.odd += [tag for name, _ in attrs if name.startswith("on")]
        self.odd += [tag] * (tag in ("img", "iframe", "object", "embed", "svg", "base", "form"))


def _poison(value: Any, text: str) -> Any:
    if isinstance(value, dict):
        return {key: _poison(own, text) for key, own in value.items()}
    if isinstance(value, list):
        return [_poison(own, text) for own in value]
    return value + text if isinstance(value, str) and value not in ("finished", "digits", "fp32", "cpu") else value


def test_hostile_texts_before_every_command(here, tmp_path: Path, survived) -> None:
    """As names of folders and hosts, in every text of recipe, environment and summary."""
    other, count = make_run(tmp_path / "others", "other"), 0
    for number, text in enumerate(HOSTILE):
        plain = make_run(tmp_path / f"made-{number}", "run", ranks=2)
        name = text.replace("/", "-")
        folder = plain.rename(plain.parent / f"run {name}")
        (folder / "telemetry" / "host-0.jsonl").rename(folder / "telemetry" / f"host {name}.jsonl")
        for file in ("environment.json", "summary.json"):
            content = json.loads((folder / file).read_text())
            (folder / file).write_text(json.dumps(_poison(content, text) | {"message": text, "status": "failed"}))
        recipe = read(other).recipe
        (folder / "recipe.yaml").write_text(json.dumps(_poison(recipe, text) | {text: {text: text}}))
        for words in _commands(folder, other):
            _polite(here(*words))
            count += 1
        page = _Page()
        page.feed((tmp_path / "report.html").read_text())
        assert (page.scripts, page.odd) == (2, []), text
        for path in (*tmp_path.glob("logbook/*/*.svg"), *tmp_path.glob("logbook/**/*.md"), tmp_path / "report.html"):
            assert not _CONTROL.search(path.read_text().replace("\t", "")), path
    survived("hostile texts, by command", count)


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_recipes_are_shown_as_they_are(here, tmp_path: Path, survived, text: str) -> None:
    path = tmp_path / "hostile.yaml"
    tree = {"name": text, "data": {"path": text}, "model": {"name": text}, "about": {"source": text}}
    path.write_text(json.dumps(tree))
    for words in (("train", path), ("train", path, "--help"), ("plan", path), ("train", "digits", "--seed", text)):
        _polite(here(*words))
    _polite(here("evaluate", tmp_path / text.replace("/", "-")))
    survived("hostile texts, by command", 5)
