"""The figures of a logging window, and how ranks send them to each other."""

import math
from dataclasses import replace

import torch

from paceline.engine.window import StepResult, Window, WindowFigures

FIGURES = WindowFigures(
    steps=3,
    loss=0.1 + 0.2,
    correct=2**24 + 1,
    first_bad=-1,
    images=96,
    data_seconds=0.25,
    compute_seconds=1.5,
    sync_seconds=0.125,
    optimizer_seconds=0.5,
    num_corrupt=7,
    peak_memory=(1 << 40) + 1,
    newest_checkpoint=500,
)


def test_figures_are_the_same_after_packing_and_unpacking() -> None:
    found = WindowFigures.unpack(FIGURES.pack())
    assert found == FIGURES
    assert [type(value) for value in vars(found).values()] == [type(value) for value in vars(FIGURES).values()]


def test_a_part_that_is_not_measured_is_left_out() -> None:
    assert FIGURES.seconds == {"data": 0.25, "compute": 1.5, "sync": 0.125, "optimizer": 0.5}
    unmeasured = WindowFigures.unpack(replace(FIGURES, sync_seconds=math.nan).pack())
    assert unmeasured.seconds == {"data": 0.25, "compute": 1.5, "optimizer": 0.5}


def _result(loss: float, correct: int) -> StepResult:
    return StepResult(torch.tensor(loss), torch.tensor(correct), lambda: 0.5, lambda: 0.25)


def test_a_window_sums_its_steps_and_starts_again() -> None:
    window = Window(torch.device("cpu"))
    for number, loss in enumerate((1.0, 2.0, math.inf, math.nan), start=1):
        window.add(_result(loss, number), images=32)
    first = window.take()
    assert (first.steps, first.correct, first.first_bad, first.images) == (4, 10, 2, 128)
    assert (first.sync_seconds, first.optimizer_seconds) == (2.0, 1.0)
    window.add(_result(0.5, 3), images=32)
    second = window.take()
    assert (second.steps, second.loss, second.correct, second.first_bad, second.images) == (1, 0.5, 3, -1, 32)
