"""The store of ranks that srun started, which have no agent to create one."""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from torch.distributed import FileStore, Store

from paceline.distributed.channel import ChannelError, token_of
from paceline.distributed.env import RankEnv, last_host
from paceline.distributed.plan import interface_env, interface_of, is_loopback, own_address_towards
from paceline.distributed.server import Server, port_unavailable
from paceline.distributed.store import network_store
from paceline.errors import UserError

_JOIN_TIMEOUT = 300.0


def store(ranks: RankEnv, environ: Mapping[str, str]) -> Store:
    """Return the ranks' store: a file on one node; the rendezvous, which rank 0 serves, on several."""
    if ranks.local_size == ranks.size:
        _use_interface_of("127.0.0.1")
        names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
        return FileStore(str(_private_folder() / ".".join(environ.get(name, "0") for name in names)), ranks.size)
    host, port, token = environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), token_of(environ)
    address = own_address_towards(host, port)
    if ranks.rank == 0:
        if is_loopback(address) and not host.startswith("127."):
            address = own_address_towards(last_host(environ["SLURM_STEP_NODELIST"]), port)
        try:
            Server(address, port, token).start()
        except OSError as error:
            raise port_unavailable(address, port, error, "set MASTER_PORT to a free port") from None
        host = address
    _use_interface_of(address)
    return _connected(f"{host}:{port}", token)


def _connected(address: str, token: bytes) -> Store:
    try:
        return network_store(address, "0/ranks", token, _JOIN_TIMEOUT)
    except ChannelError as error:
        raise UserError(error.code, f"the rendezvous at rank 0 failed: {error}") from None


def _use_interface_of(address: str) -> None:
    for name, value in interface_env(interface_of(address)).items():
        if is_loopback(address):  # a single node must not listen on the interface of multi-node jobs
            os.environ[name] = value
        else:
            os.environ.setdefault(name, value)


def _private_folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"paceline-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o77 or folder.is_symlink():
        raise UserError(
            "folder-not-private",
            f"{folder} is accessible to other users. Remove it, or set TMPDIR to a private folder.",
            path=folder,
        )
    return folder
