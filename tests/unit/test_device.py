"""The calls that system/device.py makes for GPUs, MPS and CPUs, with stubs of torch's accelerator interface."""

from typing import Any

import pytest
import torch
from simulated_device import SimulatedDevice

from paceline.data.load.order import uniform
from paceline.system import device

CPU, CUDA, MPS = torch.device("cpu"), torch.device("cuda", 1), torch.device("mps")


def _refuse(*_: Any, **__: Any) -> None:
    raise AssertionError("this device has none of it")


def test_cpus_are_timed_by_the_clock_and_need_no_accelerator(monkeypatch) -> None:
    for name in ("Event", "Stream"):
        monkeypatch.setattr(torch, name, _refuse)
    monkeypatch.setattr(torch.accelerator, "synchronize", _refuse)
    tensor = torch.arange(3)
    upload = device.Uploader(CPU).start(tensor)
    assert upload.copied is None
    assert upload.arrive() == (tensor,)
    assert upload.tensors[0] is tensor
    assert not device.host_buffer((2, 3), CPU).is_pinned()
    device.wait(CPU)
    begin = device.now(CPU)
    assert isinstance(begin, float)
    assert device.between(begin, begin + 0.5)() == pytest.approx(0.5)


@pytest.mark.parametrize("place", [CUDA, MPS], ids=str)
def test_accelerators_are_timed_by_events_on_their_current_stream(monkeypatch, place: torch.device) -> None:
    simulated, asked = SimulatedDevice(), []
    simulated.install(monkeypatch.setattr)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda there: asked.append(there) or simulated.compute)
    begin = device.now(place)
    simulated.run(0.25)
    seconds = device.between(begin, device.now(place))
    assert simulated.host == 0.0  # nothing waited
    assert seconds() == pytest.approx(0.25)
    assert asked == [place, place]


def test_mps_copies_at_once_without_streams_and_pinned_memory(monkeypatch) -> None:
    """A copy to MPS that does not block reads the host memory later, when the decoder may have overwritten it."""
    copies: list[tuple[Any, dict[str, Any]]] = []
    monkeypatch.setattr(torch, "Stream", _refuse)
    monkeypatch.setattr(torch.Tensor, "pin_memory", _refuse)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *to, **named: copies.append((to, named)) or tensor)
    upload = device.Uploader(MPS).start(torch.zeros(2), torch.ones(3))
    assert upload.copied is None
    assert copies == [((MPS,), {})] * 2
    assert not device.host_buffer((2, 3), MPS).is_pinned()


def test_random_numbers_for_mps_are_computed_on_the_cpu() -> None:
    class OnMps:
        device = MPS

        def cpu(self) -> torch.Tensor:
            return torch.arange(5)

    moved: list[torch.device] = []
    with pytest.MonkeyPatch.context() as patch:
        to = torch.Tensor.to

        def noted(tensor: torch.Tensor, target: Any, *rest: Any) -> torch.Tensor:
            if target != MPS:
                return to(tensor, target, *rest)
            moved.append(target)
            return tensor

        patch.setattr(torch.Tensor, "to", noted)
        found = uniform(3, 1, OnMps(), 2)  # type: ignore[arg-type]
    assert moved == [MPS]
    assert torch.equal(found, uniform(3, 1, torch.arange(5), 2))


def test_memory_and_waits_of_each_kind_of_device(monkeypatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda there: 100 + there.index)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 7)
    for place in (CPU, CUDA, MPS):
        device.wait(place)
    assert waited == [CUDA, MPS]
    assert device.peak_memory(CUDA) == 101
    assert device.peak_memory(MPS) == 7


def test_a_copy_to_a_gpu_comes_from_pinned_memory_and_keeps_the_layout(monkeypatch) -> None:
    simulated = SimulatedDevice()
    simulated.install(monkeypatch.setattr)
    pixels = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8).contiguous(memory_format=torch.channels_last)
    upload = device.Uploader(CPU).start(pixels)
    assert simulated.calls == [("pinned uint8", "host"), ("copy uint8", "copy"), ("record", "copy")]
    (there,) = upload.arrive()
    assert simulated.calls[3:] == [("wait_event", "compute"), ("record_stream", "compute")]
    assert torch.equal(there, pixels)
    assert there.stride() == pixels.stride()
    assert there.data_ptr() != pixels.data_ptr()
