"""Closes the ports of a rank: gloo accepts any peer, and keeps listening after the ranks have connected."""

import ctypes
import os
import socket
import struct
import sys
from contextlib import suppress

_ATTACH_FILTER = 26  # SO_ATTACH_FILTER, which the socket module does not name
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)  # a BPF program of one instruction: drop every packet


def refuse_new_connections() -> None:
    """Drop new connections to this process; existing ones continue. Linux only."""
    if sys.platform != "linux":
        return
    instructions = ctypes.create_string_buffer(_DROP_ALL, len(_DROP_ALL))
    program = struct.pack("HL", 1, ctypes.addressof(instructions))
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as each:
            is_network = each.family in (socket.AF_INET, socket.AF_INET6)
            if is_network and each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                each.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, program)
