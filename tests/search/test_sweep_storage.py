"""Storages that are corrupt, locked, or belong to another sweep: clear errors, and nothing is changed."""

import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from conftest import raises

from paceline.config.io import load_recipe
from paceline.search import storage, study
from paceline.search.spec import SweepSpec, make_spec
from paceline.search.study import SharedStudy
from paceline.search.trial import TrialEnd


@pytest.fixture(autouse=True)
def _impatient(monkeypatch) -> None:
    for module in (storage, study):
        monkeypatch.setattr(module, "LOCK_SECONDS", 0.2)


def _spec(tmp_path: Path, place: str = "journal", **more: Any) -> SweepSpec:
    settings = more.pop("settings", ["optim.lr=log:0.01..1"])
    recipe = load_recipe("digits", more.pop("overrides", []))
    return make_spec(recipe, settings, tmp_path / "runs" / more.pop("name", "sweep"), storage=place, **more)


def _finish(shared: SharedStudy, value: float = 0.5) -> int:
    claim = shared.next()
    assert claim
    shared.finish(claim, TrialEnd("complete", value, 1.0, 1.0))
    return claim.number


@pytest.mark.parametrize(("place", "file"), [("journal", "study.journal"), ("sqlite", "study.db")])
def test_a_corrupt_storage_is_refused_and_left_alone(tmp_path: Path, place: str, file: str) -> None:
    _finish(SharedStudy(_spec(tmp_path, place)))
    path = tmp_path / "runs" / "sweep" / file
    for content in (b"garbage\n", b"garbage " * 1000 + b"\n", b'{"op_code": 99}\n{}\n', path.read_bytes()[100:]):
        path.write_bytes(content)
        with raises("storage-corrupt"):
            SharedStudy(_spec(tmp_path, place))
        assert path.read_bytes() == content


def test_an_incomplete_last_line_is_removed(tmp_path: Path) -> None:
    _finish(SharedStudy(_spec(tmp_path)))
    path = tmp_path / "runs" / "sweep" / "study.journal"
    whole = path.read_bytes()
    for cut in (1, 7, 5000):
        path.write_bytes(whole + b"x" * cut)
        shared = SharedStudy(_spec(tmp_path))
        assert _finish(shared) == 1
        assert path.read_bytes().startswith(whole + b"{")
        path.write_bytes(whole)


def test_a_locked_database_is_an_error(tmp_path: Path) -> None:
    _finish(SharedStudy(_spec(tmp_path, "sqlite")))
    other = sqlite3.connect(tmp_path / "runs" / "sweep" / "study.db", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    with raises("storage-locked"):
        SharedStudy(_spec(tmp_path, "sqlite"))
    other.close()
    assert _finish(SharedStudy(_spec(tmp_path, "sqlite"))) == 1


def test_a_locked_folder_is_an_error(tmp_path: Path) -> None:
    shared = SharedStudy(_spec(tmp_path))
    with shared._locked(), raises("storage-locked"):
        SharedStudy(_spec(tmp_path))
    SharedStudy(_spec(tmp_path))


def test_a_study_of_another_sweep_is_refused(tmp_path: Path) -> None:
    _finish(SharedStudy(_spec(tmp_path)))
    for more in (
        {"overrides": ["--seed=3"]},
        {"settings": ["optim.lr=log:0.01..2"]},
        {"settings": ["optim.lr=log:0.01..1", "seed=1,2"]},
        {"metric": "loss"},
    ):
        with raises("study-differs") as caught:
            SharedStudy(_spec(tmp_path, **more))
        assert caught.value.fields["differing"]
        assert ("seed: 0 / 3" in str(caught.value)) == ("overrides" in more)
    assert _finish(SharedStudy(_spec(tmp_path, sampler="random", trials=3))) == 1  # the sampler may change


def test_a_database_with_the_study_of_another_folder_is_refused(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'shared.db'}"
    SharedStudy(_spec(tmp_path, url))
    shutil.move(tmp_path / "runs", tmp_path / "moved")
    with raises("study-of-other-folder"):
        SharedStudy(_spec(tmp_path, url))
    assert not (tmp_path / "runs" / "sweep").exists(), "nothing is left behind"
    SharedStudy(_spec(tmp_path, url, name="other"))


def test_other_folders_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "sweep"
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text("name: x\n")
    with raises("folder-not-a-sweep"):
        SharedStudy(_spec(tmp_path))
    shutil.rmtree(folder)
    folder.write_text("a file")
    with raises("folder-not-a-sweep"):
        SharedStudy(_spec(tmp_path))


@pytest.mark.parametrize(
    ("place", "code"),
    [("nowhere", "invalid-storage"), ("postgresql://u:secret@h/d", "password-in-url"), ("x://h", "storage-failed")],
)
def test_places_that_are_no_storage(tmp_path: Path, place: str, code: str) -> None:
    with raises(code) as caught:
        SharedStudy(_spec(tmp_path, place))
    assert "secret" not in str(caught.value)
    assert not (tmp_path / "runs" / "sweep").exists()


def test_two_workers_never_have_the_same_trial(tmp_path: Path) -> None:
    one, other = SharedStudy(_spec(tmp_path, trials=3)), SharedStudy(_spec(tmp_path, trials=3))
    claims = [one.next(), other.next(), one.next()]
    assert [claim.number for claim in claims if claim] == [0, 1, 2]
    assert one.next() is other.next() is None
    assert not one.is_done()
    assert claims[1]
    values = claims[1].trial.params
    claims[1].lock.release()  # as if its worker was killed
    taken = one.next()
    assert taken
    assert (taken.number, taken.trial.params) == (1, values)
    assert other.next() is None


@pytest.mark.parametrize("sampler", ["tpe", "random", "qmc", "gp", "grid"])
def test_samplers_stay_within_the_space_and_repeat_with_their_seed(tmp_path: Path, sampler: str) -> None:
    settings = ["optim.lr=0.1..0.5:0.1", "train.global_batch=64,128,256"]

    def values(name: str) -> list[dict[str, Any]]:
        spec = _spec(tmp_path, name=name, settings=settings, sampler=sampler, seed=1, trials=13)
        shared, found = SharedStudy(spec), []
        while claim := shared.next():
            found.append(claim.trial.params)
            shared.finish(claim, TrialEnd("complete", claim.trial.params["optim.lr"], 1.0, 1.0))
        assert shared.is_done()
        return found

    found = values("one")
    assert len(found) == 13
    assert all(
        0.1 <= point["optim.lr"] <= 0.5 and point["train.global_batch"] in ("64", "128", "256") for point in found
    )
    if sampler != "gp":  # fits a model with torch, whose results need not repeat to the last bit
        assert values("two") == found
    if sampler == "grid":
        assert len({tuple(point.values()) for point in found}) == 13


@pytest.mark.parametrize("pruner", ["none", "median", "hyperband"])
def test_pruners_stop_bad_trials_only(tmp_path: Path, pruner: str) -> None:
    """Digits trains for 20 epochs; the quality of a trial shows from the first one."""
    shared = SharedStudy(_spec(tmp_path, pruner=pruner, sampler="random", seed=0, trials=30))
    kept, pruned = [], []
    while claim := shared.next():
        quality = claim.trial.params["optim.lr"]
        if any(shared.report(claim, epoch, quality + 0.001 * epoch) for epoch in range(1, 21)):
            pruned.append(quality)
            shared.finish(claim, TrialEnd("pruned", quality, 1.0, 1.0))
        else:
            kept.append(quality)
            shared.finish(claim, TrialEnd("complete", quality, 20.0, 1.0))
    assert len(kept) + len(pruned) == 30
    assert bool(pruned) == (pruner != "none")
    assert max(kept) > max(pruned, default=0.0)
