"""Compilation: what is compiled, counted and timed, and what is missing. On the CPU, with torch's quickest back end."""

from collections.abc import Iterator

import pytest
import torch
from conftest import raises
from torch import nn

from paceline.config.phases import Phase
from paceline.config.recipe import Recipe, Train
from paceline.config.timeline import Timeline
from paceline.engine import compiled
from paceline.engine.compiled import Compilation, compile_model
from paceline.engine.kernels import any_shape
from paceline.system.logs import log

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def eager(monkeypatch) -> Iterator[None]:
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).relu()


def timeline(*batches: int) -> Timeline:
    phases = tuple(Phase((float(n), float(n + 1)), global_batch=batch) for n, batch in enumerate(batches))
    train = Train(duration=f"{len(batches)}ep", global_batch=batches[0])
    return Timeline.of(Recipe("any", phases=phases, train=train), 96)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(*(Block() for _ in range(4))))


def test_blocks_are_compiled_once_per_shape_and_keep_their_names() -> None:
    model, plain = network(), network()
    compilation = compile_model(model, timeline(8, 16), CPU)
    counts = []
    for batch in (8, 8, 16, 16, 8):
        images = torch.randn(batch, 4)
        assert torch.equal(model(images), plain(images))
        counts.append(compilation.count)
    assert counts == [1, 1, 2, 2, 2]  # four equal blocks share their code
    assert list(model.state_dict()) == list(plain.state_dict())
    assert compilation.take_seconds() > 0 == compilation.take_seconds()


def test_a_model_without_repeated_blocks_is_compiled_as_a_whole() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    compilation = compile_model(model, timeline(8), CPU)
    model(torch.zeros(8, 4))
    assert compilation.count == 1


def test_evaluation_runs_the_plain_model() -> None:
    """The last batch of an evaluation is often smaller."""
    model = network()
    compilation = compile_model(model, timeline(8), CPU)
    with torch.no_grad(), any_shape(compiled=True):
        for batch in (8, 8, 3):
            model.eval()(torch.zeros(batch, 4))
    assert compilation.count == 0


def test_the_limit_of_torch_is_raised_to_what_the_phases_need() -> None:
    """Otherwise torch would silently stop compiling: with 4 blocks of one class, after the second of 20 shapes."""
    compile_model(network(), timeline(*range(2, 22)), CPU)
    assert torch.compiler.config.recompile_limit >= 4 * 20
    assert torch.compiler.config.accumulated_recompile_limit >= 256


def test_recompilations_without_a_new_shape_are_counted_with_one_warning(caplog) -> None:
    compilation, phases = Compilation(), timeline(8, 16).phases
    with caplog.at_level("WARNING", logger=log.name):
        for phase in phases:
            for _ in range(3):
                compilation.end(None)  # the first two steps of a shape are expected to compile
                compilation.after_step(phase)
                compilation.after_step(phase)
    assert compilation.recompilations == 4
    assert caplog.text.count("compiled again") == 1


@pytest.mark.parametrize(("device", "variable"), [("cpu", "CXX"), ("cuda", "CC")])
def test_a_missing_compiler_is_named(monkeypatch, device: str, variable: str) -> None:
    monkeypatch.setenv(variable, "no-such-compiler")
    with raises("compiler-not-found") as caught:
        compile_model(network(), timeline(8), torch.device(device))
    assert caught.value.fields == {"compiler": "no-such-compiler"}
    monkeypatch.delenv(variable)
    monkeypatch.setenv("PATH", "")
    with raises("compiler-not-found"):
        compile_model(network(), timeline(8), torch.device(device))
