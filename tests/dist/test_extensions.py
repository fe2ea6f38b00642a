"""A package outside of the project extends it, with the same guarantees as built-in parts."""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import TINY, environment
from extension_recipe import IMPORTS, USED
from processes import start, wait_for_step

from paceline.analysis.read import read
from paceline.checkpoint.writer import Writer
from paceline.track.records import RunFolder

PACKAGE = Path(__file__).parents[1] / "extension"
Paceline = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def package(monkeypatch) -> dict[str, str]:
    """The environment in which the package is installed."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(PACKAGE), os.environ.get("PYTHONPATH", "")])))
    return environment()


def _losses(run: Path) -> list[float]:
    return [record["loss"] for record in RunFolder(run).records() if record["kind"] == "train"]


def test_one_and_two_ranks_train_the_same(paceline: Paceline, package, tmp_path: Path) -> None:
    words = (*USED, *IMPORTS, "--model.options", "{plain: true}")
    for procs in (1, 2):
        answer = paceline("train", "digits", *words, "--procs", procs, "--name", f"r{procs}", env=package)
        assert answer.returncode == 0, answer.stderr
    one, two = (_losses(tmp_path / "runs" / name) for name in ("r1", "r2"))
    assert len(one) == 30
    assert max(abs(ours - theirs) for ours, theirs in zip(one, two, strict=True)) < 1e-5
    run = tmp_path / "runs" / "r2"
    seen = (run / "seen.txt").read_text().split()
    assert seen[0] == "start"
    assert seen.count("evaluation") == 3
    assert seen.count("checkpoint") == 6
    assert seen[-1] == "finished"
    logged = [record for record in RunFolder(run).records() if record["kind"] == "callback"]
    assert [record["values"]["evaluations"] for record in logged] == [1, 2, 3]
    imports = json.loads((run / "environment.json").read_text())["starts"][0]["imports"]
    assert set(imports) == {"shapes.data", "shapes.training"}
    assert all(len(entry["sha256"]) == 64 for entry in imports.values())
    results = set()
    for procs in (1, 2, 3):
        answer = paceline("evaluate", run, "--procs", procs, env=package)
        assert answer.returncode == 0, answer.stderr
        results.add(answer.stdout)
    assert len(results) == 1


def test_kill_and_resume_are_bit_identical(paceline: Paceline, package, tmp_path: Path, monkeypatch) -> None:
    assert paceline("train", "digits", *USED, *IMPORTS, "--name", "whole", env=package).returncode == 0
    process = start(tmp_path, "train", "digits", *USED, *IMPORTS, "--name", "killed", "--train.duration", "30ba")
    wait_for_step(process, tmp_path / "runs" / "killed", 12)
    process.send_signal(signal.SIGKILL)
    process.wait()
    answer = paceline("train", "--resume", "runs/killed", *IMPORTS, env=package)
    assert answer.returncode == 0, answer.stderr
    whole, killed = (tmp_path / "runs" / name for name in ("whole", "killed"))
    assert _losses(whole) == _losses(killed)
    weights = [(run / "checkpoints" / "step-00000030" / "model.safetensors").read_bytes() for run in (whole, killed)]
    assert weights[0] == weights[1]


@pytest.mark.parametrize("more", [(), ("--callbacks", "{watcher: {fail_at: 28}}")])
def test_callbacks_see_every_checkpoint_of_a_slow_disk(
    here, monkeypatch, tmp_path: Path, more: tuple[str, ...]
) -> None:
    monkeypatch.syspath_prepend(PACKAGE)
    monkeypatch.setattr(Writer, "writing", True)  # until the next checkpoint
    here("train", "digits", *USED, *IMPORTS, *more)
    seen = (tmp_path / "runs" / "digits" / "seen.txt").read_text().split()
    assert seen.count("checkpoint") == 6
    assert seen[-1] == ("failure" if more else "finished")


@pytest.mark.parametrize("procs", [1, 2])
def test_a_callback_can_stop_a_run(paceline: Paceline, package, tmp_path: Path, procs: int) -> None:
    words = (*USED, *IMPORTS, "--callbacks", "{watcher: {stop_at: 12}}", "--procs", procs)
    answer = paceline("train", "digits", *words, env=package)
    assert answer.returncode == 0, answer.stderr
    summary = RunFolder(tmp_path / "runs" / "digits").read_summary()
    assert summary["status"] == "finished"
    assert summary["stop_reason"] == "enough"
    assert summary["step"] == 12


@pytest.mark.parametrize("procs", [1, 2])
def test_an_exception_in_a_callback_fails_all_ranks_after_a_checkpoint(
    paceline: Paceline, package, tmp_path: Path, procs: int
) -> None:
    words = (*USED, *IMPORTS, "--callbacks", "{watcher: {fail_at: 12}}", "--procs", procs)
    answer = paceline("train", "digits", *words, env=package)
    assert answer.returncode == 1
    assert "[extension-failed]" in answer.stderr
    assert "shapes.training.Watcher" in answer.stderr
    assert "Traceback" not in answer.stderr
    run = RunFolder(tmp_path / "runs" / "digits")
    assert run.read_summary()["status"] == "failed"
    assert (run.path / "seen.txt").read_text().endswith("failure")
    assert sorted(path.name for path in run.checkpoints.iterdir())[-1] >= "step-00000012"


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--model.name", "shapes-nett"), "unknown-model"),
        (("--data.name", "shape"), "unknown-dataset"),
        (("--train.loss", "focall"), "unknown-loss"),
        (("--data.augment.custom", "{brightnes: {}}"), "unknown-augmentation"),
        (("--callbacks", "{watch: {}}"), "unknown-callback"),
        (("--callbacks", "{watcher: {nonsense: 1}}"), "extension-failed"),
        (("--model.options", "{widht: 3}"), "extension-failed"),
        (("--data.options", "{sample: 3}"), "extension-failed"),
        (("--import", "shapes.nothing"), "import-not-found"),
        (("--import", "shapes.broken"), "import-failed"),
    ],
)
def test_errors_name_the_extension(here, monkeypatch, tmp_path: Path, words: tuple[str, ...], code: str) -> None:
    monkeypatch.syspath_prepend(PACKAGE)
    answer = here("train", "digits", *USED, *IMPORTS, *words)
    assert answer.returncode == 1
    assert f"[{code}]" in answer.stderr
    assert not list(tmp_path.glob("runs/*"))


def test_a_failing_augmentation_is_reported_once(here, monkeypatch) -> None:
    monkeypatch.syspath_prepend(PACKAGE)
    answer = here("train", "digits", *USED, *IMPORTS, "--data.augment.custom", "{brightness: {strength: dark}}")
    assert answer.returncode == 1
    assert answer.stderr.count("shapes.data.brightness") == 1
    assert "TensorBoard" not in answer.stderr


def test_a_module_beside_a_recipe_needs_consent(paceline: Paceline, tmp_path: Path) -> None:
    shutil.copytree(PACKAGE / "shapes", tmp_path / "shapes")
    (tmp_path / "recipe.yaml").write_text("base: digits\nname: mine\nimports: [shapes.data, shapes.training]\n")
    words = ("train", "recipe.yaml", *USED, "--train.duration", "5ba")
    answer = paceline(*words)
    assert answer.returncode == 1
    assert "[import-not-trusted]" in answer.stderr
    assert paceline(*words, "--import", "shapes.data", "--procs", "2").returncode == 0


@pytest.mark.parametrize("more", [(), ("--import", "mine"), ("--import", "mine", "--procs", 2)])
def test_code_beside_a_recipe_that_is_not_named_does_not_run(paceline: Paceline, tmp_path: Path, more) -> None:
    (tmp_path / "mine.py").touch()
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "__init__.py").write_text("from pathlib import Path\nPath('ran').touch()\n")
    (tmp_path / "theirs" / "nets.py").touch()
    (tmp_path / "recipe.yaml").write_text("base: digits\nname: mine\nimports: [theirs.nets]\n")
    assert "[import-not-trusted]" in paceline("train", "recipe.yaml", *TINY, *more).stderr
    assert not (tmp_path / "ran").exists()


CALLBACK = """
import paceline as pl

@pl.register_callback("quiet")
class Quiet(pl.Callback):
    pass
"""


def test_a_resume_with_changed_code_warns(here, monkeypatch, tmp_path: Path) -> None:
    (module := tmp_path / "code" / "changing.py").parent.mkdir()
    module.write_text(CALLBACK)
    monkeypatch.syspath_prepend(module.parent)
    assert here("train", "digits", *TINY, "--train.duration", "10ba", "--import", "changing").returncode == 0
    warning = "has changed since the last start of this run: changing.py"
    unchanged = here("train", "--resume", "runs/digits", "--train.duration", "20ba")
    assert unchanged.returncode == 0, unchanged.stderr
    assert warning not in unchanged.stderr
    module.write_text(f"{CALLBACK}    # fixed\n")
    changed = here("train", "--resume", "runs/digits", "--train.duration", "30ba")
    assert changed.returncode == 0, changed.stderr
    assert warning in changed.stderr
    assert "resumed with changed code of imported modules: changing.py" in read(tmp_path / "runs" / "digits").notes
