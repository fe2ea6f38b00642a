"""From a verb to the ranks that do its work."""

import multiprocessing
import os
from typing import TYPE_CHECKING

from paceline.system.host import limit_openmp_spinning
from paceline.system.signals import interrupts_end

if TYPE_CHECKING:
    from paceline.distributed.plan import JoinSpec


def start_ranks(command: list[str], procs: int, join: "JoinSpec | None" = None) -> int:
    """Run a command as `procs` ranks of this machine, alone or as one of several; the exit status."""
    from paceline.distributed import forkserver
    from paceline.distributed.plan import JoinSpec, plan

    with interrupts_end():
        planned = plan(command, procs, join or JoinSpec())
        os.environ.update(planned.environment)
        limit_openmp_spinning()
        multiprocessing.set_forkserver_preload(["paceline.engine.preload"])
        forkserver.start_server()  # it imports torch while this process does
        from paceline.cli.main import main
        from paceline.distributed import run

        return run.run(planned, main)
