"""Untrusted texts and logs: control characters and HTML in them have no effect in terminals and browsers."""

import json
import random
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from made_runs import make_run

from attack.run_folders import CONTROL, HOSTILE_NUMBERS, check_polite, commands, sealed
from paceline.analysis.read import read


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run as the engine writes it, with checksums."""
    return sealed(make_run(tmp_path / "runs", "one", ranks=2))


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
            check_polite(here("compare", run, tmp_path / name))
            count += 1
    events = tmp_path / "events.out.tfevents.1.host"
    generator = random.Random(4)
    for content in (b"", b"\xff" * 100, generator.randbytes(10_000)):
        events.write_bytes(content)
        check_polite(here("compare", run, events))
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
    """Collects elements that a hostile text could add to a page."""

    def __init__(self) -> None:
        super().__init__()
        self.scripts, self.odd = 0, list[str]()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        self.odd += [tag for name, _ in attrs if name.startswith("on")]
        self.odd += [tag] * (tag in ("img", "iframe", "object", "embed", "svg", "base", "form"))


def _poison(value: Any, text: str) -> Any:
    if isinstance(value, dict):
        return {key: _poison(item, text) for key, item in value.items()}
    if isinstance(value, list):
        return [_poison(item, text) for item in value]
    return value + text if isinstance(value, str) and value not in ("finished", "digits", "fp32", "cpu") else value


def test_hostile_texts_with_every_command(here, tmp_path: Path, survived) -> None:
    """In names of folders and hosts, and in every string of recipe, environment and summary."""
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
        for words in commands(folder, other):
            check_polite(here(*words))
            count += 1
        page = _Page()
        page.feed((tmp_path / "report.html").read_text())
        assert (page.scripts, page.odd) == (2, []), text
        for path in (*tmp_path.glob("logbook/*/*.svg"), *tmp_path.glob("logbook/**/*.md"), tmp_path / "report.html"):
            assert not CONTROL.search(path.read_text().replace("\t", "")), path
    survived("hostile texts, by command", count)


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_recipes_are_escaped(here, tmp_path: Path, survived, text: str) -> None:
    path = tmp_path / "hostile.yaml"
    tree = {"name": text, "data": {"path": text}, "model": {"name": text}, "about": {"source": text}}
    path.write_text(json.dumps(tree))
    for words in (("train", path), ("train", path, "--help"), ("plan", path), ("train", "digits", "--seed", text)):
        check_polite(here(*words))
    check_polite(here("evaluate", tmp_path / text.replace("/", "-")))
    survived("hostile texts, by command", 5)
