"""Reads the NVIDIA GPUs of this host through NVML. Without a driver or GPUs there are no samples and no errors."""

from collections.abc import Callable, Sequence
from typing import Any


class Gpus:
    """The GPUs of a run on this host."""

    def __init__(self, wanted: Sequence[str] | None = None) -> None:
        """`wanted`: endings of the GPUs' UUIDs; None for all GPUs."""
        self.described: list[dict[str, Any]] = []
        self._handles: list[Any] = []
        if wanted is not None and not wanted:
            return
        try:
            import pynvml

            pynvml.nvmlInit()
        except Exception:  # no driver, or an incompatible one
            return
        self._nvml = pynvml
        indices = range(self._query(lambda _: pynvml.nvmlDeviceGetCount(), None) or 0)
        found = [self._query(pynvml.nvmlDeviceGetHandleByIndex, index) for index in indices]
        every = [handle for handle in found if handle is not None]  # a GPU that fell off the bus has no handle
        endings = tuple(wanted or ("",))
        chosen = [handle for handle in every if (self._query(self._identifier, handle) or "").endswith(endings)]
        self._handles = chosen or every  # MIG devices have other UUIDs than their GPU
        self.described = [
            {
                "name": self._query(lambda h: _text(pynvml.nvmlDeviceGetName(h)), handle) or "GPU",
                "uuid": self._query(self._identifier, handle),
                "memory_total_bytes": self._query(lambda h: int(pynvml.nvmlDeviceGetMemoryInfo(h).total), handle) or 0,
            }
            for handle in self._handles
        ]

    def sample(self) -> list[dict[str, Any]]:
        """Return utilization, memory, power, temperature and clock per GPU; unsupported values are None."""
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
        return [{name: self._query(figure, handle) for name, figure in figures.items()} for handle in self._handles]

    def processes(self) -> list[int]:
        """Return the ids of processes that compute on these GPUs."""
        if not self._handles:
            return []
        found = [self._query(self._nvml.nvmlDeviceGetComputeRunningProcesses, handle) or [] for handle in self._handles]
        return sorted({process.pid for processes in found for process in processes})

    def driver(self) -> str | None:
        """Return the version of the driver."""
        return self._query(lambda _: _text(self._nvml.nvmlSystemGetDriverVersion()), None) if self._handles else None

    def _identifier(self, handle: Any) -> str:
        return _text(self._nvml.nvmlDeviceGetUUID(handle))

    @staticmethod
    def _query(function: Callable[[Any], Any], handle: Any) -> Any:
        try:
            return function(handle)
        except Exception:  # virtual GPUs do not support all queries
            return None

    def close(self) -> None:
        if self._handles:
            self._nvml.nvmlShutdown()


def _text(name: Any) -> str:
    return name.decode() if isinstance(name, bytes) else str(name)
