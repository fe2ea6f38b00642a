"""The command line before any command runs."""

import pytest

from paceline.cli.main import main

INTERNAL = ("try-batch", "rendezvous", "facts", "probe", "test-allreduce")


@pytest.mark.parametrize(("typed", "meant"), [("trian", "train"), ("evalute", "evaluate"), ("job", "jobs")])
def test_an_unknown_command_gets_a_suggestion(typed: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([typed, "digits"]) == 2
    printed = capsys.readouterr().err
    assert "[unknown-command]" in printed
    assert f"'{typed}'" in printed
    assert f" {meant}?" in printed
    assert len(printed.splitlines()) == 2


@pytest.mark.parametrize("typed", ["nonsense", "fact", "probes"])
def test_internal_commands_are_not_suggested(typed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([typed]) == 2
    printed = capsys.readouterr().err
    assert "prepare" in printed
    assert not [command for command in INTERNAL if command in printed.replace(typed, "")]


def test_help_lists_only_public_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    printed = capsys.readouterr().out
    assert "train a recipe" in printed
    assert not [command for command in INTERNAL if command in printed.split()]


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "train a recipe" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["rendezvous", "facts", "probe"])
def test_internal_commands_work(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([command, "--help"])
    assert left.value.code == 0
    assert f"paceline {command}" in capsys.readouterr().out
