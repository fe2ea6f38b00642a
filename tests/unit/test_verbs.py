"""What the command line answers before any verb begins."""

import pytest

from paceline.cli.main import main

INTERNAL = ("try-batch", "rendezvous", "facts", "probe", "test-allreduce")


@pytest.mark.parametrize(("typed", "meant"), [("trian", "train"), ("evalute", "evaluate"), ("job", "jobs")])
def test_an_unknown_verb_is_answered_with_a_close_one(
    typed: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([typed, "digits"]) == 2
    told = capsys.readouterr().err
    assert f"'{typed}' is not a verb; did you mean {meant}?" in told
    assert len(told.splitlines()) == 2


@pytest.mark.parametrize("typed", ["nonsense", "fact", "probes"])
def test_internal_verbs_are_not_revealed(typed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([typed]) == 2
    told = capsys.readouterr().err
    assert "prepare" in told
    assert not [verb for verb in INTERNAL if verb in told.replace(typed, "")]


def test_help_lists_only_verbs_for_users(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    told = capsys.readouterr().out
    assert "train a recipe" in told
    assert not [verb for verb in INTERNAL if verb in told.split()]


def test_without_a_verb_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "train a recipe" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["rendezvous", "facts", "probe"])
def test_internal_verbs_work(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([verb, "--help"])
    assert left.value.code == 0
    assert f"paceline {verb}" in capsys.readouterr().out
