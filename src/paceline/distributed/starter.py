"""Ties the processes of a node to the command that started them, which may be on another host."""

import os
import sys
import threading

from paceline.distributed.channel import TOKEN


def follow_starter() -> None:
    """Take the token of the ranks from standard input, and exit when the command closes it, however it ends."""
    os.environ[TOKEN] = sys.stdin.readline().strip()

    def wait_for_end() -> None:
        sys.stdin.read()
        os._exit(1)  # the ranks end with this process

    threading.Thread(target=wait_for_end, name="starter", daemon=True).start()
