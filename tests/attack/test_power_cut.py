"""Power cuts at any moment: what is on disk is consistent, and the same command continues from there."""

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import HANG, TINY, environment
from disk import Cut, power_cuts, preloaded
from sample_images import tree

from paceline.checkpoint import store
from paceline.data.describe import check
from paceline.data.shards import Dataset
from paceline.track.records import RunFolder

TRAIN = ("train", "digits", *TINY, "--precision", "fp32", "--log.tensorboard", "true", "--checkpoint.keep", "1")
RUN = Path("runs") / "digits"


@dataclass
class Recorded:
    """The log of commands that ran to their end on the simulated disk."""

    folder: Path
    log: Path

    def cuts(self, num_random: int = 0) -> Iterator[Cut]:
        return power_cuts(self.folder, self.log, num_random)


def _record(folder: Path, *commands: tuple[str, ...]) -> Recorded:
    (folder / "disk").mkdir()
    recorded = Recorded(folder / "disk", folder / "log")
    variables = environment() | preloaded(folder, recorded.folder, log=recorded.log)
    program = f"import sys\nfrom paceline.cli.main import main\nsys.exit(any([main(words) for words in {commands!r}]))"
    options = {"cwd": recorded.folder, "env": variables, "capture_output": True, "text": True, "timeout": HANG}
    answer = subprocess.run([sys.executable, "-c", program], **options, check=False)
    assert answer.returncode == 0, answer.stderr
    return recorded


@pytest.fixture(scope="module")
def training(tmp_path_factory) -> Recorded:
    return _record(tmp_path_factory.mktemp("training"), TRAIN)


def _values(run: RunFolder, kind: str, until: int) -> list[tuple[int, float, float]]:
    records = [record for record in run.records() if record["kind"] == kind and record["step"] <= until]
    return [(record["step"], record["loss"], record["top1"]) for record in records]


def _covered(left: RunFolder, whole: RunFolder) -> int:
    """Return the step of the newest checkpoint, after checking that all its records equal the uninterrupted run's."""
    saved = store.last(left.checkpoints)
    if saved is None:
        return 0
    step = saved.step
    assert left.recipe.read_bytes() == whole.recipe.read_bytes()
    assert left.read_starts() == whole.read_starts()
    for kind in ("train", "eval"):
        assert _values(left, kind, step) == _values(whole, kind, step), f"{kind} records of step {step}"
    assert [record["step"] for record in left.records() if record["kind"] == "checkpoint"][-1] >= step
    assert b'"kind": "host"' in next(left.telemetry.glob("*.jsonl")).read_bytes()
    assert next(left.tensorboard.iterdir()).stat().st_size > 0
    return step


def test_records_cover_the_newest_checkpoint(training: Recorded, tmp_path: Path, survived) -> None:
    whole, count, reached = RunFolder(training.folder / RUN), 0, set()
    for cut in training.cuts(num_random=50):
        try:
            reached.add(_covered(RunFolder(cut.leave(tmp_path / "left") / RUN), whole))
        except Exception as error:
            raise AssertionError(f"{cut}: {error}") from error
        count += 1
    assert reached == {0, 10, 20, 30, 40, 50, 60}
    survived("power cuts: records against the newest checkpoint", count)


def test_training_resumes_after_a_power_cut(training: Recorded, tmp_path: Path, here: Callable, survived) -> None:
    """Before the first checkpoint it starts over; after it every step is trained and recorded once."""
    whole = RunFolder(training.folder / RUN)
    cuts = list(training.cuts())
    chosen = cuts[7 :: len(cuts) // 9]
    for cut in training.cuts():
        if cut not in chosen:
            continue
        shutil.rmtree(tmp_path / "runs", ignore_errors=True)
        (cut.leave(tmp_path / "left") / "runs").mkdir(exist_ok=True)
        (tmp_path / "left" / "runs").rename(tmp_path / "runs")
        answer = here(*TRAIN)
        assert answer.returncode == 0, f"{cut}: {answer.stderr}"
        run = RunFolder(tmp_path / RUN)
        assert run.finished, cut
        assert _values(run, "train", 60) == _values(whole, "train", 60), cut
        # the last evaluation is repeated if the power cut came between it and the end
        assert dict.fromkeys(_values(run, "eval", 60)) == dict.fromkeys(_values(whole, "eval", 60)), cut
        assert run.num_corrupt == 0, cut
        assert _contents(run.path / "checkpoints" / "step-00000060", "*.safetensors") == _contents(
            whole.path / "checkpoints" / "step-00000060", "*.safetensors"
        ), cut
    survived("power cuts: resumed to the same losses and weights", len(chosen))


def test_prepared_data_is_complete_or_continued(tmp_path: Path, here: Callable, survived) -> None:
    images, words = str(tree(tmp_path / "images")), ("--original", "--max-side", "24", "--workers", "1")
    prepare = ("prepare", "folder", images, "--out", "data", *words)
    recorded = _record(tmp_path, prepare)
    whole, complete, cuts = _contents(recorded.folder / "data"), 0, list(recorded.cuts(num_random=20))
    for cut in recorded.cuts(num_random=20):
        left = cut.leave(tmp_path / "left")
        if (left / "data" / "dataset.json").exists():
            check(Dataset.open(left / "data"))
            complete += 1
        if cut in cuts[:: len(cuts) // 20]:
            shutil.rmtree(tmp_path / "data", ignore_errors=True)
            if (left / "data").exists():
                (left / "data").rename(tmp_path / "data")
            answer = here(*prepare)
            assert answer.returncode == 0, f"{cut}: {answer.stderr}"
            assert _contents(tmp_path / "data") == whole, cut
    assert 0 < complete < len(cuts)
    survived("power cuts: prepared data", len(cuts))


def test_output_of_a_command_is_on_disk_when_it_ends(tmp_path: Path, survived) -> None:
    commands = (
        TRAIN,
        ("report", str(RUN), "--out", "pages/report.html"),
        ("logbook", str(RUN), "--out", "pages/logbook"),
        ("export", str(RUN), "--to", "weights.safetensors"),
    )
    recorded = _record(tmp_path, *commands)
    *_, last = (cut for cut in recorded.cuts() if cut.surviving == "nothing")
    left = _contents(last.leave(tmp_path / "left"))
    assert left == _contents(recorded.folder)
    assert {"pages/report.html", "pages/logbook/index.md", "weights.safetensors"} <= left.keys()
    survived("power cuts: right after a command", len(commands))


def _contents(folder: Path, pattern: str = "*") -> dict[str, bytes]:
    """Return the content of all files but hidden ones, which are locks and temporary files."""
    files = {path.relative_to(folder): path for path in folder.rglob(pattern) if path.is_file()}
    return {
        str(name): path.read_bytes()
        for name, path in files.items()
        if not any(part.startswith(".") for part in name.parts)
    }
