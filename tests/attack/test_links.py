"""Links in run folders of others, which lead what training writes or deletes elsewhere."""

import os
import secrets
from pathlib import Path

import pytest
from made_runs import make_run

from attack.run_folders import check_polite, sealed
from paceline.checkpoint import store
from paceline.system.files import FolderLock, write_text


def test_a_link_that_waits_at_the_name_of_a_temporary_file(tmp_path: Path, monkeypatch, survived) -> None:
    """Were the name known, the file would still not be written through it."""
    outside, folder = tmp_path / "outside", tmp_path / "run"
    folder.mkdir()
    outside.write_text("mine")
    monkeypatch.setattr(secrets, "token_hex", lambda _: "known")
    (folder / ".recipe.yaml.known").symlink_to(outside)
    with pytest.raises(FileExistsError):
        write_text(folder / "recipe.yaml", "theirs")
    assert outside.read_text() == "mine"
    survived("links at the names of temporary files", 1)


def test_names_of_temporary_files_are_not_foreseen(tmp_path: Path, survived) -> None:
    outside = tmp_path / "outside"
    outside.write_text("mine")
    for number in range(os.getpid() - 50, os.getpid() + 50):
        (tmp_path / f".recipe.yaml.{number}").symlink_to(outside)
    write_text(tmp_path / "recipe.yaml", "theirs")
    assert outside.read_text() == "mine"
    survived("links at the names of temporary files", 100)


@pytest.mark.parametrize("name", ["checkpoints", "tensorboard", ".lock", "checkpoints/.writing-step-00000050"])
def test_training_neither_writes_nor_deletes_through_a_link(here, tmp_path: Path, survived, name: str) -> None:
    mine, run = tmp_path / "mine", sealed(make_run(tmp_path / "runs", "one", ranks=1))
    mine.mkdir()
    for step in (2, 4):
        store.write(mine / f"step-{step:08}", step, {"model": {}}, {})
    before = sorted(mine.rglob("*"))
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).symlink_to(tmp_path / "nothing" if name == ".lock" else mine)
    answer = here("train", "--resume", run)
    check_polite(answer)
    assert answer.returncode == 1
    assert Path(name).parts[0] in answer.stderr
    assert sorted(mine.rglob("*")) == before
    assert not (tmp_path / "nothing").exists()
    survived("links that lead training out of its folder", 1)


def test_a_half_checkpoint_that_is_a_link_is_removed_not_followed(tmp_path: Path, survived) -> None:
    mine, checkpoints = tmp_path / "mine", tmp_path / "checkpoints"
    mine.mkdir()
    checkpoints.mkdir()
    (mine / "kept").write_text("mine")
    (checkpoints / ".writing-step-00000002").symlink_to(mine)
    store.write(checkpoints / "step-00000002", 2, {"model": {}}, {})
    (checkpoints / ".deleting-step-00000002").symlink_to(mine)
    store.delete([checkpoints / "step-00000002"])
    assert [path.name for path in mine.iterdir()] == ["kept"]
    assert list(checkpoints.iterdir()) == []
    survived("links that lead training out of its folder", 2)


def test_a_lock_is_not_made_through_a_link(tmp_path: Path, survived) -> None:
    (tmp_path / ".lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match=r"symbolic links|\.lock"):
        FolderLock(tmp_path)
    assert not (tmp_path / "elsewhere").exists()
    survived("links that lead training out of its folder", 1)
