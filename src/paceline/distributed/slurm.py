"""The store of ranks that srun started, which no agent has prepared."""

import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from torch._C._distributed_c10d import FileStore, Store

from paceline.distributed.channel import ChannelError, StrangerError, token_of
from paceline.distributed.env import Place, last_host
from paceline.distributed.plan import interface_of, is_loopback, own_address_towards
from paceline.distributed.server import Server
from paceline.distributed.store import network_store
from paceline.errors import UserError

_JOIN_TIMEOUT = 300.0


def store(place: Place, environ: Mapping[str, str]) -> Store:
    """A file on one node; on several the rendezvous, which rank 0 serves."""
    if place.local_size == place.size:
        _use_interface_of("127.0.0.1")
        names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
        return FileStore(str(_private_folder() / ".".join(environ.get(name, "0") for name in names)), place.size)
    host, port, token = environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), token_of(environ)
    own = own_address_towards(host, port)
    if place.rank == 0:
        if is_loopback(own) and not host.startswith("127."):
            own = own_address_towards(last_host(environ["SLURM_STEP_NODELIST"]), port)
        try:
            Server(own, port, token).start()
        except OSError as error:
            raise UserError(
                f"MASTER_PORT={port} of {own} cannot be used ({error.strerror}); set MASTER_PORT to a free one"
            ) from None
        host = own
    _use_interface_of(own)
    return _connected(f"{host}:{port}", token)


def _connected(address: str, token: bytes) -> Store:
    deadline = time.monotonic() + _JOIN_TIMEOUT
    while True:
        try:
            return network_store(address, "0/ranks", token)
        except ChannelError as error:
            if isinstance(error, StrangerError) or time.monotonic() > deadline:
                raise UserError(f"the rendezvous at rank 0 failed: {error}") from None
            time.sleep(0.2)


def _use_interface_of(address: str) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, interface_of(address))


def _private_folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"paceline-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o77 or folder.is_symlink():
        raise UserError(f"{folder} is open to other users; remove it, or set TMPDIR to a folder of your own")
    return folder
