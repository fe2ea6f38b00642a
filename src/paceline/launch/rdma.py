"""RDMA networks of this machine, InfiniBand and EFA: whether NCCL can use them, or falls back to TCP."""

import os
import re
import resource
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict  # pydantic requires it before Python 3.12

from paceline.errors import Problem

EFA_PATH = "/opt/amazon/efa/bin"
"""Where the EFA installer of AWS puts fi_info; not in the PATH of commands that ssh runs."""
_EFA_DRIVER, _VERBS = Path("/sys/bus/pci/drivers/efa"), Path("/dev/infiniband")
_PLUGIN = re.compile(r"libnccl-net(-ofi|-aws-ofi)?\.so")
_MIN_LOCKED = 10**9  # bytes; what NCCL registers depends on the numbers of GPUs and channels
_GUIDE = "https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-start-nccl.html"


class RdmaFacts(TypedDict):
    """What NCCL needs to use an RDMA network."""

    efa_interfaces: int
    efa_provider: bool
    """Whether libfabric finds the interfaces."""
    nccl_plugin: bool
    """Whether the dynamic loader finds a network plugin of NCCL, such as aws-ofi-nccl."""
    verbs: bool
    """Whether the devices of the network are there; a container sees them only if asked."""
    locked_memory_bytes: int
    """-1: no limit."""


def rdma_facts() -> RdmaFacts:
    """Return what this machine has."""
    interfaces = len(list(_EFA_DRIVER.glob("*:*:*.*")))
    return {
        "efa_interfaces": interfaces,
        "efa_provider": bool(interfaces) and _succeeds("fi_info", "-p", "efa"),
        "nccl_plugin": bool(interfaces) and _has_plugin(),
        "verbs": any(_VERBS.glob("uverbs*")),
        "locked_memory_bytes": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
    }


def _succeeds(*words: str) -> bool:
    path = shutil.which(words[0], path=f"{os.environ.get('PATH', os.defpath)}:{EFA_PATH}")
    if not path:
        return False
    try:
        return not subprocess.run([path, *words[1:]], capture_output=True, timeout=30, check=False).returncode
    except (OSError, subprocess.TimeoutExpired):
        return False


def _has_plugin() -> bool:
    folders = [Path(name) for name in os.environ.get("LD_LIBRARY_PATH", "").split(":") if name]
    if any(_PLUGIN.match(path.name) for folder in folders for path in folder.glob("libnccl-net*")):
        return True
    try:
        known = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return False
    return bool(_PLUGIN.search(known))


def rdma_problems(facts: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield why NCCL cannot use the RDMA network of a machine."""
    if facts["efa_interfaces"] and not facts["efa_provider"]:
        text = (
            f"{facts['efa_interfaces']} EFA interfaces, but `fi_info -p efa` fails. Install the EFA software: {_GUIDE}"
        )
        yield Problem("efa-provider-missing", text)
    if facts["efa_interfaces"] and not facts["nccl_plugin"]:
        text = (
            "NCCL finds no plugin for EFA (libnccl-net.so of aws-ofi-nccl) and uses TCP. Install it, or add its folder "
            "to LD_LIBRARY_PATH."
        )
        yield Problem("efa-plugin-missing", text)
    if facts["efa_interfaces"] and not facts["verbs"]:
        text = "the EFA devices are not visible. In a container, use --device /dev/infiniband."
        yield Problem("rdma-devices-missing", text)
    if facts["verbs"] and 0 <= facts["locked_memory_bytes"] < _MIN_LOCKED:
        size = facts["locked_memory_bytes"] / 1e6
        text = (
            f"locked memory is limited to {size:.3g} MB, and RDMA needs more. Run: ulimit -l unlimited; in a "
            "container, use --ulimit memlock=-1."
        )
        yield Problem("locked-memory-low", text)
