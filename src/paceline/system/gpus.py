"""The GPUs of this machine as its drivers list them, and those that processes may use. Does not import torch.

Nothing here initializes CUDA, so a process that calls it can still fork.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import UserError

_KFD = Path("/sys/class/kfd/kfd/topology/nodes")
_RENDER_NODES = Path("/dev/dri")
VARIABLES = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""What restricts the GPUs of a process, all of them on AMD."""
_VARIABLES_OF = {"nvidia": ("CUDA_VISIBLE_DEVICES",), "amd": VARIABLES}


@dataclass(frozen=True)
class Gpu:
    """A GPU that a driver lists."""

    vendor: str
    """nvidia or amd."""
    name: str
    uuid: str
    """What CUDA_VISIBLE_DEVICES or HIP_VISIBLE_DEVICES calls it: its UUID, or its index if it has none."""


def installed_gpus() -> list[Gpu]:
    """Return the GPUs that NVML or AMD's kernel driver list, also those that torch cannot use."""
    return _nvidia() or _amd()


def visible_gpus(environ: Mapping[str, str] = os.environ) -> list[Gpu]:
    """Return the installed GPUs that CUDA_VISIBLE_DEVICES or HIP_VISIBLE_DEVICES leave to processes."""
    installed = installed_gpus()
    for name in _VARIABLES_OF[installed[0].vendor] if installed else ():
        if name in environ:
            installed = _selected(installed, environ[name])
    return installed


def are_gpus_hidden(environ: Mapping[str, str]) -> bool:
    """Return whether a variable hides all GPUs on purpose; SLURM sets NoDevFiles in jobs without GPUs."""
    return any(environ[name].strip() in ("", "-1", "NoDevFiles") for name in VARIABLES if name in environ)


def no_gpu() -> UserError:
    """Return the error of device=cuda on a machine without a visible GPU."""
    message = "device=cuda: this machine has no visible GPU. Check CUDA_VISIBLE_DEVICES, or use --device cpu."
    return UserError("no-gpu", message)


def only_visible(gpus: Sequence[Gpu]) -> dict[str, str]:
    """Return the variables that leave only these GPUs to a process."""
    names = ",".join(gpu.uuid for gpu in gpus)
    if gpus[0].vendor == "nvidia":
        return {"CUDA_VISIBLE_DEVICES": names}
    # HIP counts from 0 among those that ROCr leaves
    return {"ROCR_VISIBLE_DEVICES": names, "HIP_VISIBLE_DEVICES": ",".join(map(str, range(len(gpus))))}


def gpus_side_by_side(gpus: Sequence[Gpu], procs: int, parallel: int) -> list[dict[str, str]]:
    """Return the variables that leave `procs` GPUs of their own to each of several trainings. UserError if too few."""
    if (needed := procs * parallel) > len(gpus):
        message = (
            f"--parallel {parallel} with --procs {procs} needs {needed} GPUs, but {len(gpus)} are visible. Lower one "
            "of them."
        )
        raise UserError("too-few-gpus", message, gpus=len(gpus), needed=needed)
    return [only_visible(gpus[number * procs :][:procs]) for number in range(parallel)]


def default_procs(device: str, environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of processes per node for --procs auto: one per visible GPU, one on other devices."""
    return max(1, len(visible_gpus(environ))) if device in ("auto", "cuda") else 1


def _nvidia() -> list[Gpu]:
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no driver, or an incompatible one
        return []
    found = []
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                name, uuid = pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetUUID(handle)
            except pynvml.NVMLError:  # a GPU that fell off the bus
                continue
            found.append(Gpu("nvidia", _text(name), _text(uuid)))
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()
    return found


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _amd() -> list[Gpu]:
    """Read the nodes of AMD's compute driver. CPUs are nodes too, and have no SIMD units."""
    found: list[Gpu] = []
    for node in sorted(_KFD.glob("[0-9]*"), key=lambda path: int(path.name)):
        try:
            lines = (node / "properties").read_text().splitlines()
            properties = {key: int(value) for key, _, value in (line.partition(" ") for line in lines)}
            name = (node / "name").read_text().strip()
        except (OSError, ValueError):  # a GPU that this container or job was not given cannot be read
            continue
        minor = properties.get("drm_render_minor", 0)
        if properties.get("simd_count") and (_RENDER_NODES / f"renderD{minor}").exists():
            unique = properties.get("unique_id")  # 0 on GPUs that have none; HIP accepts the index as well
            found.append(Gpu("amd", name or "AMD GPU", f"GPU-{unique:016x}" if unique else str(len(found))))
    return found


def _selected(gpus: list[Gpu], value: str) -> list[Gpu]:
    """Return the GPUs that a variable lists by index or UUID. As in CUDA, the first invalid entry ends the list."""
    chosen: list[Gpu] = []
    for entry in (word.strip() for word in value.split(",")):
        if entry.isdecimal():
            found = gpus[int(entry) : int(entry) + 1]
        elif entry.startswith("MIG-"):
            return chosen or gpus[:1]  # CUDA uses one MIG instance per process
        else:
            found = [gpu for gpu in gpus if entry and gpu.uuid.startswith(entry)]
        if len(found) != 1:
            break
        if found[0] in chosen:
            return []  # CUDA lists no GPU if one is given twice
        chosen += found
    return chosen
