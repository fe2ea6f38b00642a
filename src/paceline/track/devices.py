"""NVIDIA GPUs of this host through NVML. No driver, no GPUs: then there is nothing to sample, and nothing fails."""

from collections.abc import Callable, Sequence
from typing import Any


class Gpus:
    def __init__(self, wanted: Sequence[str] | None = None) -> None:
        """Those with these identifiers (as NVIDIA's UUIDs end), or all."""
        self.described: list[dict[str, Any]] = []
        self._handles: list[Any] = []
        if wanted is not None and not wanted:
            return
        try:
            import pynvml

            pynvml.nvmlInit()
        except Exception:  # no driver, or one that answers with something unheard of
            return
        self._nvml = pynvml
        numbers = range(self._ask(lambda _: pynvml.nvmlDeviceGetCount(), None) or 0)
        found = [self._ask(pynvml.nvmlDeviceGetHandleByIndex, number) for number in numbers]
        every = [handle for handle in found if handle is not None]  # one that fell off the bus has none
        endings = tuple(wanted or ("",))
        chosen = [handle for handle in every if (self._ask(self._identifier, handle) or "").endswith(endings)]
        self._handles = chosen or every  # slices of a GPU have identifiers that NVML tells otherwise
        self.described = [
            {
                "name": self._ask(lambda h: _text(pynvml.nvmlDeviceGetName(h)), handle) or "GPU",
                "uuid": self._ask(self._identifier, handle),
                "memory_total_bytes": self._ask(lambda h: int(pynvml.nvmlDeviceGetMemoryInfo(h).total), handle) or 0,
            }
            for handle in self._handles
        ]

    def sample(self) -> list[dict[str, Any]]:
        """Use, memory, power, temperature and clock of each; what a device does not tell is null."""
        if not self._handles:
            return []
        nvml = self._nvml
        figures: dict[str, Callable[[Any], float]] = {
            "use_percent": lambda h: nvml.nvmlDeviceGetUtilizationRates(h).gpu,
            "memory_bytes": lambda h: int(nvml.nvmlDeviceGetMemoryInfo(h).used),
            "watts": lambda h: nvml.nvmlDeviceGetPowerUsage(h) / 1000,
            "celsius": lambda h: nvml.nvmlDeviceGetTemperature(h, nvml.NVML_TEMPERATURE_GPU),
            "megahertz": lambda h: nvml.nvmlDeviceGetClockInfo(h, nvml.NVML_CLOCK_SM),
        }
        return [{name: self._ask(figure, handle) for name, figure in figures.items()} for handle in self._handles]

    def processes(self) -> list[int]:
        """Numbers of processes that compute on them."""
        if not self._handles:
            return []
        found = [self._ask(self._nvml.nvmlDeviceGetComputeRunningProcesses, handle) or [] for handle in self._handles]
        return sorted({process.pid for processes in found for process in processes})

    def driver(self) -> str | None:
        return self._ask(lambda _: _text(self._nvml.nvmlSystemGetDriverVersion()), None) if self._handles else None

    def _identifier(self, handle: Any) -> str:
        return _text(self._nvml.nvmlDeviceGetUUID(handle))

    @staticmethod
    def _ask(question: Callable[[Any], Any], handle: Any) -> Any:
        try:
            return question(handle)
        except Exception:  # virtual GPUs do not answer everything
            return None

    def close(self) -> None:
        if self._handles:
            self._nvml.nvmlShutdown()


def _text(name: Any) -> str:
    return name.decode() if isinstance(name, bytes) else str(name)
