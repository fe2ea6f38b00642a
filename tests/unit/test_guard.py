"""Truncating a mapped shard is an error of its samples; any other SIGBUS still kills the process."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import HANG, environment
from sample_images import jpeg, sample_image

_BEGIN = """
import faulthandler, mmap, sys, threading
import numpy as np
from paceline.data import codec

def mapped(path):
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

path, other = sys.argv[1:]
record = codec.pack(open(path, "rb").read())
with open(path, "wb") as file:
    file.write(record * 200 + bytes(codec.OVERRUN))
shards = codec.Shards([mapped(path)])
places = np.array([[0, number * len(record), len(record)] for number in range(200)], np.int64)
boxes = np.tile(np.array([0, 0, 90, 60, 0], np.int32), (200, 1))

def crop():
    return codec.Decoder(shards).crop(places, boxes, np.zeros((200, 3, 24, 24), np.uint8))
"""

_TRUNCATE = """
assert not crop().any()
with open(path, "r+b") as file:
    file.truncate(len(record) * 10)
found = []
threads = [threading.Thread(target=lambda: found.append(crop())) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
again = crop()
for statuses in (*found, again):
    assert not statuses[:9].any() and statuses[10:].all(), statuses
assert len(found) == 4
print(codec.reason(int(again[-1])))
"""

_ELSEWHERE = """
crop()
view = np.frombuffer(mapped(other), np.uint8)
with open(other, "r+b") as file:
    file.truncate(0)
crop()
print(view.sum())
"""

_HANDLERS = {"no handler": "", "faulthandler first": "before", "faulthandler later": "after"}


def _run(tmp_path: Path, handler: str, script: str) -> subprocess.CompletedProcess[str]:
    enable = "\nfaulthandler.enable()\n"
    code = (enable if handler == "before" else "").join(["import faulthandler\n", _BEGIN])
    code += (f"\ncrop(){enable}" if handler == "after" else "") + script
    (tmp_path / "shard").write_bytes(jpeg(sample_image(90, 60)))
    (tmp_path / "other").write_bytes(bytes(10_000))
    words = [sys.executable, "-c", code, str(tmp_path / "shard"), str(tmp_path / "other")]
    return subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=HANG, check=False)


@pytest.mark.parametrize("handler", _HANDLERS.values(), ids=_HANDLERS.keys())
def test_records_of_a_truncated_shard_fail_in_every_thread(tmp_path: Path, handler: str) -> None:
    answer = _run(tmp_path, handler, _TRUNCATE)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout == "the shard was truncated, or its disk failed, while it was read\n"


@pytest.mark.parametrize("handler", _HANDLERS.values(), ids=_HANDLERS.keys())
def test_other_bus_errors_go_to_the_previous_handler(tmp_path: Path, handler: str) -> None:
    answer = _run(tmp_path, handler, _ELSEWHERE)
    assert answer.returncode == -signal.SIGBUS, answer.stdout
    assert answer.stderr.count("Fatal Python error: Bus error") == (1 if handler else 0)
