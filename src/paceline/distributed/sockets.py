"""Ports of a rank. gloo serves whoever connects, and goes on listening after the ranks have found each other."""

import ctypes
import os
import socket
import struct
import sys
from contextlib import suppress

_ATTACH_FILTER = 26  # SO_ATTACH_FILTER, which the socket module does not name
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)  # a filter of one instruction: return 0 bytes of every packet


def refuse_new_connections() -> None:
    """From now on nobody can connect to this process; connections that exist go on. Linux only."""
    if sys.platform != "linux":
        return
    instructions = ctypes.create_string_buffer(_DROP_ALL, len(_DROP_ALL))
    program = struct.pack("HL", 1, ctypes.addressof(instructions))
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as own:
            is_network = own.family in (socket.AF_INET, socket.AF_INET6)
            if is_network and own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                own.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, program)
