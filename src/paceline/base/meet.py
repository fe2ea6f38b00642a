"""The meeting place: the list of a job's machines, kept by a process of its own, so that no training machine has to."""

import signal
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistNetworkError

from paceline.errors import UserError


def serve(port: int) -> None:
    """Until a signal ends it."""
    ends = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    try:
        store = TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    except DistNetworkError:
        raise UserError(f"port {port} is in use; end what uses it, or choose another --port") from None
    print(f"meeting place at port {store.port}", flush=True)
    signal.sigwait(ends)
