"""The command line before any command runs."""

import pytest

from paceline.cli.main import main

INTERNAL = ("try-batch", "facts", "probe", "test-allreduce")


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


@pytest.mark.parametrize("command", ["facts", "probe"])
def test_internal_commands_work(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([command, "--help"])
    assert left.value.code == 0
    assert f"paceline {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("train digits --proc 2", "--procs"),
        ("train --proc 2 digits", "--procs"),
        ("evaluate runs/one --proc 2", "--procs"),
        ("plan digits --node 2", "--nodes"),
        ("find-batch digits --max-bach=2", "--max-batch"),
        ("launch local digits --node 2", "--nodes"),
        ("launch locl digits", "local"),
        ("compare one two --ot x", "--out"),
    ],
)
def test_misspelled_options_and_choices_get_a_suggestion(typed: str, meant: str, capsys) -> None:
    try:
        status: object = main(typed.split())
    except SystemExit as exit:  # of argparse
        status = exit.code
    assert status == 2
    assert f"Did you mean {meant}?" in capsys.readouterr().err


def test_a_misspelled_field_is_not_taken_for_an_option(capsys) -> None:
    assert main(["plan", "digits", "--seeed", "1"]) == 1
    printed = capsys.readouterr().err
    assert "seed?" in printed
    assert "[unknown-field]" in printed


@pytest.mark.parametrize("words", ["train --help digits", "train digits --help", "help train digits"])
def test_help_before_the_recipe_shows_its_fields(words: str, capsys) -> None:
    assert main(words.split()) == 0
    printed = capsys.readouterr()
    assert "fields of digits" in printed.out
    assert not printed.err


@pytest.mark.parametrize(("words", "shown"), [("help", "COMMAND"), ("help launch ssh", "--hosts")])
def test_help_is_a_command(words: str, shown: str, capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words.split())
    assert caught.value.code == 0
    assert shown in capsys.readouterr().out
