"""The rendezvous in a process of its own, so that no training node has to run it."""

import asyncio
import os
import signal

from paceline.distributed.channel import token_of
from paceline.distributed.server import Server
from paceline.errors import UserError


def serve(address: str, port: int) -> None:
    """Until a signal ends it."""
    try:
        server = Server(address, port, token_of(os.environ))
    except OSError as error:
        raise UserError(
            f"port {port} of {address} cannot be used ({error.strerror}); end what uses it, or choose another --port"
        ) from None
    print(f"rendezvous at {address}:{server.port}", flush=True)
    asyncio.run(_until_a_signal(server))


async def _until_a_signal(server: Server) -> None:
    serving = asyncio.ensure_future(server.serve())
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, serving.cancel)
    await asyncio.wait([serving])
