"""Probes of a selftest: what waits for the device, which kernels and which models losses are compared with."""

import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from paceline.distributed.world import World
from paceline.engine import compiled
from paceline.engine.build import Setup, build
from paceline.engine.evaluation import saved
from paceline.engine.kernels import choose_kernels
from paceline.selftest import rank
from paceline.selftest.probes import Probing, losses, runs, steps, syncs
from paceline.selftest.probes.exact import exact_kernels
from paceline.selftest.probes.plain import plain_model
from paceline.selftest.probes.syncs import finding_waits
from paceline.selftest.settings import Settings, exact_recipe
from paceline.system.logs import log

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SYNCHRONIZING = "called a synchronizing CUDA operation (Triggered internally at ...)"


def test_a_read_of_a_tensor_within_a_step_is_found() -> None:
    places: set[str] = set()
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter], foreach=False)  # reads its step count, which is no wait
    with finding_waits(CPU, places):
        parameter.sum().backward()
        optimizer.step()
    assert not places
    with finding_waits(CPU, places):
        _reads(torch.ones(3))
    assert len(places) == 2
    assert all(f" in _reads ({__file__}:" in place for place in places)
    assert {place.split()[0] for place in places} == {"item", "nonzero"}


def _reads(tensor: torch.Tensor) -> None:
    float(tensor.sum())
    tensor.nonzero()


@pytest.fixture
def own_log() -> Iterator[None]:
    """Training sends log messages to standard error, which must not last."""
    yield
    log.handlers, log.propagate = [], True


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The modes in which CUDA was asked to report what waits."""
    chosen: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", chosen.append)
    return chosen


def test_what_cuda_reports_is_found_and_no_rank_stops(modes: list[str]) -> None:
    places: set[str] = set()
    with finding_waits(CUDA, places):
        warnings.warn("something else", stacklevel=1)
        for _ in range(2):  # Python shows a repeated warning only once by default
            warnings.warn(SYNCHRONIZING, stacklevel=1)
    assert modes == ["warn", "default"]
    (place,) = places
    assert place.startswith("synchronization in test_what_cuda_reports_is_found_and_no_rank_stops")


def test_what_cuda_reports_of_an_optimizer_is_found(modes: list[str]) -> None:
    """Reads of an optimizer's own numbers are no waits, but CUDA reports only what is one."""
    places: set[str] = set()
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(3))])
    optimizer.register_step_pre_hook(lambda *_: warnings.warn(SYNCHRONIZING, stacklevel=1))
    with finding_waits(CUDA, places):
        optimizer.step()
    assert len(places) == 1


def test_what_cuda_reports_of_a_backward_pass_is_found(modes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """torch passes on the warnings of its threads when backward() returns."""
    own, autograd = (traceback.FrameSummary(name, 7, "step") for name in ("net.py", syncs._AUTOGRAD))
    monkeypatch.setattr(syncs.traceback, "extract_stack", lambda: [own, autograd])
    places: set[str] = set()
    with finding_waits(CUDA, places):
        warnings.warn(SYNCHRONIZING, stacklevel=1)
    assert places == {"synchronization in step (net.py:7)"}


def test_a_thread_without_python_is_observed(modes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As DDP's reducer, which autograd calls on the thread of a GPU."""
    monkeypatch.setattr(syncs.traceback, "extract_stack", list)
    places: set[str] = set()
    with finding_waits(CUDA, places):
        torch.ones(1).item()
        assert not places
        warnings.warn(SYNCHRONIZING, stacklevel=1)
    assert places == {"synchronization in a thread of torch"}


def test_comparisons_use_exact_kernels_whatever_training_chooses() -> None:
    before = _kernel_flags()
    with exact_kernels():
        choose_kernels(CUDA, tf32=True)
        nn.Linear(2, 2)(torch.ones(1, 2))
        assert _kernel_flags() == (False, False, False, True)
    assert _kernel_flags() == before


@pytest.mark.usefixtures("one_thread", "own_log")
def test_every_probe_compiles_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch does not compile code again that has run while `syncs` observed it."""
    compiled_by: list[str] = []

    def measure(name: str, _: Probing) -> dict[str, object]:
        def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
            compiled_by.append(name)
            return graph.forward

        block = torch.compile(_block, backend=backend, dynamic=False)
        block(torch.ones(2))
        with finding_waits(CPU, set()):
            block(torch.ones(3))
        return {}

    monkeypatch.setattr(rank, "measure", measure)
    rank.run_probes(["syncs", "steps"], _settings(overrides=("--compile", "true")))
    assert compiled_by == ["syncs", "steps"]


def _block(values: torch.Tensor) -> torch.Tensor:
    return values * 2


@pytest.mark.usefixtures("one_thread", "own_log")
def test_a_checkpoint_is_evaluated_with_exact_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluation chooses TF32 as it does on a GPU, after which its loss would differ from the recorded one."""
    probing = _probing(folder=str(tmp_path))
    runs.whole_run(probing)
    monkeypatch.setattr(saved, "choose_kernels", lambda _, tf32: choose_kernels(CUDA, tf32))
    used = set[tuple[bool, ...]]()
    hook = register_module_forward_hook(lambda *_: used.add(_kernel_flags()))
    try:
        found = runs.round_trip(probing)
    finally:
        hook.remove()
    assert used == {(False, False, False, True)}
    assert found["loaded"] == pytest.approx(found["recorded"])
    assert found["flipped"]
    assert not found["undetected"]


@pytest.fixture(params=["--compile=true", "--model.activation_checkpointing=full"])
def changed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Setup]:
    """A setup whose blocks have another forward pass than their class."""
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    torch.compiler.reset()
    yield build(exact_recipe(_settings(overrides=(request.param,))), World())
    torch.compiler.reset()


def test_the_plain_model_has_its_own_weights_and_forward_passes(changed: Setup) -> None:
    original, images = changed.replica.module, torch.randn(2, changed.source.channels, 8, 8)
    plain = plain_model(changed)
    assert not [module for module in plain.modules() if "forward" in vars(module)]
    assert [module for module in original.modules() if "forward" in vars(module)]
    expected = original(images)
    torch.testing.assert_close(plain(images), expected)
    with torch.no_grad():
        for parameter in original.parameters():
            parameter.zero_()
    torch.testing.assert_close(plain(images), expected)


def test_plain_loops_do_not_train_the_original(changed: Setup) -> None:
    original = changed.replica.module
    losses._plain_losses(changed)
    images, targets = changed.objective.prepare(next(changed.loader.steps())[0], 0)
    steps._plain_step(changed, images, targets, communicate=False)()
    assert all(parameter.grad is None for parameter in original.parameters())


def test_a_plain_loop_recomputes_what_training_recomputes(changed: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise activation checkpointing would count as overhead of the training loop."""
    models: list[nn.Module] = []
    monkeypatch.setattr(steps, "plain_model", lambda setup: models.append(plain_model(setup)) or models[0])
    images, targets = changed.objective.prepare(next(changed.loader.steps())[0], 0)
    steps._plain_step(changed, images, targets, communicate=False)
    replaced = [module for module in models[0].modules() if "forward" in vars(module)]
    assert bool(replaced) == (changed.recipe.model.activation_checkpointing == "full")


def test_precisions_are_those_that_a_device_trains_in(monkeypatch: pytest.MonkeyPatch) -> None:
    assert losses._precisions(torch.device("mps")) == ["fp32"]
    assert losses._precisions(CPU) == ["fp32", "bf16"]
    for bf16, expected in ((True, ["fp32", "bf16", "fp16"]), (False, ["fp32", "fp16"])):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, bf16=bf16: bf16)
        assert losses._precisions(CUDA) == expected


def _settings(**more: object) -> Settings:
    return Settings(device="cpu", procs=1, **more)


def _probing(**more: object) -> Probing:
    return Probing(World(), _settings(**more))


def _kernel_flags() -> tuple[bool, ...]:
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    return cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32, torch.are_deterministic_algorithms_enabled()
