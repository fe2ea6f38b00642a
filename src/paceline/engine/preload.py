"""Slow imports, done once by the process that ranks are forked from. Importing this starts no threads."""

from paceline.distributed.forkserver import enter_server

enter_server()
from paceline.system.torchvision_compat import allow_torchvision  # noqa: E402

allow_torchvision()
import timm  # noqa: E402, F401

import paceline.distributed.fsdp  # noqa: E402
import paceline.engine.session  # noqa: E402
import paceline.engine.trial  # noqa: E402, F401
