"""The time split and the verdict of real runs on a simulated device, whose streams have a clock of their own."""

from pathlib import Path

import pytest
from processes import run_ranks

from paceline.analysis.read import read
from paceline.analysis.run import LoggedRun
from paceline.analysis.verdict import verdict

STEPS = 20
WORDS = (
    *("train", "digits", "--device", "cpu", "--precision", "fp32", "--train.duration", f"{STEPS}ba"),
    *("--log.every", "5ba", "--log.tensorboard", "false", "--model.options", "{widths: [8, 16], norm: group}"),
    *("--train.global_batch", 16, "--evaluate.every", "100ba", "--checkpoint.every", "100ba"),
)


def _simulate(decode: float = 0.0, copy: float = 0.0, compute: float = 0.1, sync: float = 0.0, optimizer: float = 0.0):
    """Let the host wait for `decode` seconds per batch. Everything else takes time on a stream only."""
    from simulated_device import SimulatedDevice
    from torch import device as torch_device
    from torch.optim import SGD

    from paceline.data.load import in_memory
    from paceline.distributed.ddp import Replica
    from paceline.engine import train
    from paceline.engine.window import Window
    from paceline.system.device import between, now

    cpu = torch_device("cpu")
    device = SimulatedDevice(copy / 2)  # pixels or keys, and labels
    device.install(setattr)
    steps, take, step, update = in_memory.ResidentLoader.steps, Window.take, train.train_step, SGD.step

    def loaded(self, first_step: int = 0):
        batches = steps(self, first_step)
        while True:
            device.host += decode
            yield next(batches)

    def computed(setup, *arguments):
        device.run(compute)
        return step(setup, *arguments)

    def updated(self, *arguments, **named):
        device.run(optimizer)
        return update(self, *arguments, **named)

    def synchronized(self):
        begin = now(cpu)
        device.run(sync)
        return between(begin, now(cpu))

    def taken(self):
        figures = take(self)
        device.wait()  # reading the losses waits for the device
        return figures

    in_memory.ResidentLoader.steps = loaded
    train.train_step, SGD.step, Replica.sync_seconds, Window.take = computed, updated, synchronized, taken


def _busy_host(_rank: int) -> None:
    _simulate(decode=0.08, compute=0.1)


def _slow_decoding(_rank: int) -> None:
    _simulate(decode=0.4, compute=0.1)


def _slow_copies(_rank: int) -> None:
    _simulate(copy=0.3, compute=0.1)


def _slow_network(_rank: int) -> None:
    _simulate(decode=0.01, compute=0.1, sync=0.1)


def _slow_optimizer(_rank: int) -> None:
    _simulate(decode=0.01, compute=0.1, optimizer=0.1)


def _run(folder: Path, procs: int, before) -> LoggedRun:
    run_ranks(folder, procs, *WORDS, before=before)
    return read(folder / "runs" / "digits")


def test_a_device_that_always_has_work_is_compute_bound_although_the_host_waits_for_batches(tmp_path: Path) -> None:
    """The host waits for data during 80% of a step, but the device computes the previous step meanwhile."""
    run = _run(tmp_path, 1, _busy_host)
    assert verdict(run)[0].cause == "compute-bound"
    assert run.seconds["compute"] == pytest.approx(STEPS * 0.1)
    # at the start of each of four windows the device is idle until the first batch has arrived
    assert run.seconds["data"] == pytest.approx(4 * 0.08)
    assert run.train_seconds == pytest.approx(STEPS * 0.1 + 4 * 0.08)


def test_a_device_that_waits_for_decoding_is_input_bound(tmp_path: Path) -> None:
    run = _run(tmp_path, 1, _slow_decoding)
    found = verdict(run)[0]
    assert found.cause == "input-bound"
    # 0.3 s per step; after a log record the device is idle for the 0.1 s in which it computed before
    assert run.seconds["data"] == pytest.approx(STEPS * 0.3 + 4 * 0.1)
    assert run.train_seconds == pytest.approx(run.seconds["data"] + STEPS * 0.1)


def test_a_device_that_waits_for_copies_is_input_bound(tmp_path: Path) -> None:
    run = _run(tmp_path, 1, _slow_copies)
    assert verdict(run)[0].cause == "input-bound"
    assert run.seconds["compute"] == pytest.approx(STEPS * 0.1)


def test_a_device_that_waits_for_gradients_is_communication_bound(tmp_path: Path) -> None:
    run = _run(tmp_path, 2, _slow_network)
    assert verdict(run)[0].cause == "communication-bound"
    assert run.seconds["sync"] == pytest.approx(STEPS * 0.1)
    # the device waits for data at the start of each of four windows, and after the first step: start-up ends there
    assert run.train_seconds == pytest.approx(STEPS * 0.2 + 5 * 0.01)


def test_a_slow_optimizer_is_measured_on_the_device(tmp_path: Path) -> None:
    run = _run(tmp_path, 1, _slow_optimizer)
    assert verdict(run)[0].cause == "small-batch"
    assert run.seconds["optimizer"] == pytest.approx(STEPS * 0.1)
    assert run.seconds["compute"] == pytest.approx(STEPS * 0.1)


@pytest.mark.parametrize(
    "before", [_busy_host, _slow_decoding, _slow_copies, _slow_network, _slow_optimizer], ids=lambda f: f.__name__[1:]
)
def test_the_parts_of_every_window_add_up_to_its_wall_time(before, monkeypatch) -> None:
    """In one process, with the same window and a loop like that of the engine."""
    import torch
    from simulated_device import SimulatedDevice

    from paceline.engine.window import StepResult, Window
    from paceline.system.device import between, now

    seconds: dict[str, float] = {}
    monkeypatch.setitem(globals(), "_simulate", lambda **parts: seconds.update(parts))
    before(0)
    device, cpu, loss = SimulatedDevice(), torch.device("cpu"), torch.zeros(())
    device.install(monkeypatch.setattr)
    window, started = Window(cpu), 0.0
    for step in range(10):
        with window.waiting_for_data():
            device.host += seconds.get("decode", 0.0)
            device.compute.done = max(device.compute.done, device.host + seconds.get("copy", 0.0))
        device.run(seconds.get("compute", 0.1))
        marks = [now(cpu)]
        for part in ("sync", "optimizer"):
            device.run(seconds.get(part, 0.0))
            marks.append(now(cpu))
        window.add(StepResult(loss, loss, between(*marks[:2]), between(*marks[1:])), images=1)
        if step % 5 == 4:
            figures = window.take()
            assert sum(figures.seconds.values()) == pytest.approx(device.compute.done - started)
            assert figures.sync_seconds == pytest.approx(5 * seconds.get("sync", 0.0))
            assert min(figures.seconds.values()) >= -1e-9
            device.wait()
            started = device.host
