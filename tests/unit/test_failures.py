"""Errors that ranks report to their agent, and which of several failures is the cause."""

import signal
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from paceline.distributed.env import AGENT
from paceline.distributed.failures import first_failure, is_own_error, reported_error
from paceline.distributed.reports import LOST_RANK, report_error
from paceline.errors import ConfigError, Problem, UserError


@pytest.fixture
def failure(tmp_path: Path, monkeypatch):
    """A function that returns the failure of a rank with an exit code and an optional error."""

    def make(exitcode: int, error: UserError | None = None) -> ProcessFailure:
        path = tmp_path / f"error-{len(list(tmp_path.iterdir()))}.json"
        if error:
            monkeypatch.setenv(AGENT, str(tmp_path))
            monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
            assert report_error(error)
        return ProcessFailure(0, 1, exitcode, str(path))

    return make


@pytest.mark.parametrize(
    "error",
    [
        UserError("disk-full", "metrics.jsonl: No space left on device (0.0 kB free); free some space"),
        UserError("data-not-found", "[brackets] and\nseveral lines"),
        ConfigError("digits", [Problem("unknown-field", "a"), Problem("invalid-value", "b")]),
    ],
)
def test_an_error_of_a_rank_is_printed_as_the_rank_would(failure, error: UserError) -> None:
    reported = reported_error(failure(1, error))
    assert reported is not None
    assert type(reported) is type(error)
    assert (reported.code, reported.report) == (error.code, error.report)


def test_an_error_keeps_its_code_and_fields(failure) -> None:
    error = first_failure(
        {3: failure(1, UserError("data-not-found", "there is no data", path=Path("a"), sizes=(1, 2)))}
    )
    assert (error.code, str(error)) == ("data-not-found", "there is no data")
    assert error.fields == {"path": "a", "sizes": [1, 2]}


def test_without_an_agent_nothing_is_reported(monkeypatch) -> None:
    monkeypatch.delenv(AGENT, raising=False)
    assert not report_error(UserError("data-not-found", "there is no data"))


def test_the_loss_of_another_rank_is_not_the_cause(failure) -> None:
    lost = failure(1, UserError(LOST_RANK, "rank 0 lost the connection to another rank"))
    assert not is_own_error(lost)
    for cause, code in (
        (failure(-signal.SIGKILL), "rank-killed"),
        (failure(255), "rank-killed"),
        (failure(1, UserError("data-not-found", "there is no data")), "data-not-found"),
        (failure(1), "rank-failed"),
    ):
        assert first_failure({0: lost, 1: cause}).code == code
    assert first_failure({0: lost, 1: failure(-signal.SIGTERM)}).code == "rank-crashed"


def test_an_abort_by_nccl_is_a_consequence(failure) -> None:
    aborted = failure(-signal.SIGABRT)
    lost = failure(1, UserError(LOST_RANK, "rank 0 lost the connection to another rank"))
    for cause, code in (
        (failure(-signal.SIGKILL), "rank-killed"),
        (failure(1), "rank-failed"),
        (failure(-signal.SIGSEGV), "rank-crashed"),
        (failure(1, UserError("data-not-found", "there is no data")), "data-not-found"),
    ):
        found = first_failure({0: aborted, 1: cause, 2: lost})
        assert found.code == code
        assert found.fields.get("rank", 1) == 1
    assert first_failure({0: aborted, 1: lost}).code == LOST_RANK  # another node has the cause
    assert first_failure({0: aborted}).code == "rank-crashed"
    assert not is_own_error(aborted)  # an elastic job restarts


def test_an_aborted_rank_may_have_reported_why(failure) -> None:
    error = UserError(LOST_RANK, "rank 2 did not arrive", missing=[2])
    assert first_failure({0: failure(-signal.SIGABRT, error)}).fields == {"missing": [2]}


def test_a_crash_names_the_rank_and_the_signal(failure) -> None:
    error = first_failure({2: failure(-signal.SIGSEGV)})
    assert (error.code, error.fields) == ("rank-crashed", {"rank": 2})
    assert "SIGSEGV" in str(error)
