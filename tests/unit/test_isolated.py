"""Decoder processes with real limits: a file that crashes its process affects no other file."""

import signal
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import HANG, raises
from hostile import png_of, slow_bmp
from sample_images import jpeg, sample_image

from paceline.data import codec
from paceline.data.prepare import isolated
from paceline.data.prepare.convert import Variant, convert, convert_as
from paceline.data.prepare.isolated import Isolated
from paceline.system.untrusted import Unreadable

VALID = jpeg(sample_image(40, 30))


def test_threads_share_processes_and_get_the_result_of_a_direct_call() -> None:
    files = [jpeg(sample_image(40, 30 + number)) for number in range(12)]
    with Isolated(convert_as, [{}, {"max_side": 16}]) as isolated_convert, ThreadPoolExecutor(3) as pool:
        results = list(pool.map(isolated_convert, files, timeout=HANG))
        assert 1 <= len(isolated_convert._idle) <= 3
    assert results == [convert(content, [Variant(), Variant(max_side=16)]) for content in files]


def test_image_over_the_time_limit_is_unreadable_but_not_the_next_one() -> None:
    with Isolated(convert_as, [{}], cpu_seconds=1) as convert:
        with pytest.raises(Unreadable, match="1 s of CPU time"):
            convert(slow_bmp(15_000))
        assert codec.describe(convert(VALID)[0][0]) == (40, 30, 3)


def test_image_over_the_memory_limit_is_unreadable_but_not_the_next_one() -> None:
    with Isolated(convert_as, [{}], memory=50_000_000) as convert:
        with pytest.raises(Unreadable, match="memory"):
            convert(png_of(10_000, 10_000))
        assert codec.describe(convert(VALID)[0][0]) == (40, 30, 3)


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (f"os.kill(os.getpid(), {signal.SIGSEGV:d})", "SIGSEGV"),
        ("os._exit(3)", "exit status 3"),
        ("os.write(1, b'[[5], null, 0]\\nabc')", "exit status 0"),
        ("os.write(1, b'nonsense\\n')", "exit status 0"),
    ],
)
def test_file_that_crashes_its_process_is_unreadable(monkeypatch, end: str, reason: str) -> None:
    monkeypatch.setattr(isolated, "_COMMAND", _decoder_that(end))
    with Isolated(convert_as, [{}]) as convert, pytest.raises(Unreadable, match=reason):
        convert(VALID)


def test_killed_process_is_an_error(monkeypatch) -> None:
    monkeypatch.setattr(isolated, "_COMMAND", _decoder_that(f"os.kill(os.getpid(), {signal.SIGKILL:d})"))
    with Isolated(convert_as, [{}]) as convert, raises("decoder-killed") as caught:
        convert(VALID)
    assert "--workers" in str(caught.value)


def _decoder_that(end: str) -> list[str]:
    """A decoder process that starts, reads a request and then ends in some way."""
    return [sys.executable, "-c", f"import os, sys; os.write(1, b'\\n'); sys.stdin.buffer.read(8); {end}"]


def test_process_that_fails_to_import_is_an_error(monkeypatch) -> None:
    monkeypatch.setattr(isolated, "_COMMAND", [sys.executable, "-c", "import nothing_of_this_name"])
    with Isolated(convert_as, [{}]) as convert, raises("decoder-start-failed"):
        convert(VALID)


def test_process_that_cannot_be_created_is_an_error_not_an_unreadable_file(monkeypatch) -> None:
    monkeypatch.setattr(isolated, "_COMMAND", ["/nowhere/python"])
    with Isolated(convert_as, [{}]) as convert, raises("decoder-start-failed") as caught:
        convert(VALID)
    assert "--workers" in str(caught.value)


def test_the_current_folder_is_not_searched_for_modules(tmp_path, monkeypatch) -> None:
    (tmp_path / "json.py").write_text("open('canary', 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    with Isolated(convert_as, [{}]) as convert:
        convert(VALID)
    assert not (tmp_path / "canary").exists()
