"""Ties a process to the selftest that started it, which may be on another host."""

import os
import sys
import threading

from paceline.distributed.channel import TOKEN


def follow_selftest() -> None:
    """Take the token of the job from standard input, and exit when the selftest closes it, however it ends."""
    os.environ[TOKEN] = sys.stdin.readline().strip()

    def wait_for_end() -> None:
        sys.stdin.read()
        os._exit(1)  # the ranks end with this process

    threading.Thread(target=wait_for_end, name="selftest", daemon=True).start()
