"""`launch --selftest`: every node runs the selftest before any of them starts."""

import re
import sys
from pathlib import Path

import pytest
from conftest import complaint

from paceline.launch import execution
from paceline.launch.api import dry_run
from paceline.launch.hosts import Host, HostError
from paceline.launch.job import all_ids
from paceline.launch.planning import SELFTEST, HostStep

# a Python whose `paceline selftest` prints a table and fails on one node; other commands are the real ones
PYTHON = """#!/bin/sh
case "$*" in
    "-m paceline selftest"*) ;;
    *) exec {python} "$@" ;;
esac
echo "$PACELINE_HOST $CUDA_VISIBLE_DEVICES $*" >> {calls}
echo "losses  pass"
[ "$PACELINE_HOST" = "{good}" ] || {{ echo "all-reduce  fail"; exit 1; }}
"""


@pytest.fixture(autouse=True)
def own_home(here, monkeypatch, tmp_path: Path) -> None:
    """Runs after `here`, which clears such variables."""
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))


def _python(tmp_path: Path, good: str) -> Path:
    path = tmp_path / "python"
    path.write_text(PYTHON.format(python=sys.executable, calls=tmp_path / "calls", good=good))
    path.chmod(0o700)
    return path


def test_job_with_a_failed_selftest_does_not_train(here, tmp_path: Path) -> None:
    words = ("--nodes", 2, "--python", _python(tmp_path, "node-0"), "--selftest", "--device", "cpu")
    answer = here("launch", "local", *words, "digits")
    message = complaint(answer)
    assert "[selftest-failed]" in message
    assert "node-1" in message
    assert "node-1 | all-reduce  fail" in answer.stdout + answer.stderr  # the table
    assert len((tmp_path / "calls").read_text().splitlines()) == 2
    assert "-m paceline selftest --device cpu" in (tmp_path / "calls").read_text()
    assert all_ids() == []
    assert not (tmp_path / "runs").exists()


def test_tables_of_nodes_that_pass_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    host = Host("node-0", str(tmp_path))
    step = HostStep("node-0", SELFTEST, "echo 'losses  pass'")
    execution.execute([step], {"node-0": host}, {}, lambda: False)
    assert "node-0 | losses  pass" in "".join(capsys.readouterr())
    failing = HostStep("node-0", SELFTEST, "echo 'losses  fail'; exit 1")
    with pytest.raises(HostError) as caught:
        execution.execute([failing], {"node-0": host}, {}, lambda: False)
    assert caught.value.code == "selftest-failed"


def test_selftest_comes_after_the_preparation_and_before_the_start() -> None:
    plan = dry_run("ssh", "digits", {"device": "cpu"}, hosts=["a", "b"], selftest=True)
    titles = re.findall(r"^# [a-z]+: (\w+)$", plan, flags=re.MULTILINE)
    assert titles.index("selftest") > titles.index("environment")
    assert titles.index("selftest") < titles.index("rendezvous") < titles.index("start")
    assert titles.count("selftest") == 2
    assert "selftest" not in dry_run("ssh", "digits", {"device": "cpu"}, hosts=["a", "b"])
