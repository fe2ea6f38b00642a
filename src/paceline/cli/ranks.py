"""From a verb to the ranks that do its work."""

import os
from typing import TYPE_CHECKING

from paceline.base.host import limit_openmp_spinning

if TYPE_CHECKING:
    from paceline.distributed.plan import Meeting


def start_ranks(command: list[str], procs: int, meeting: "Meeting | None" = None) -> int:
    """Run a command as `procs` ranks of this machine, alone or as one of several; the exit status."""
    from paceline.distributed.plan import Meeting, plan

    planned = plan(command, procs, meeting or Meeting())
    os.environ.update(planned.environment)
    limit_openmp_spinning()
    from paceline.cli.main import main
    from paceline.distributed import agent, ranks

    ranks.preload("paceline.engine.preload")
    return agent.run(planned, main)
