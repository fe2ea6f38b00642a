"""Real processes under real limits: a file that ends its process costs that file, and nothing else."""

import signal
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import HANG
from hostile import png_of, slow_bmp
from sample_images import jpeg, sample_image

from paceline.data import codec
from paceline.data.prepare import isolated
from paceline.data.prepare.convert import convert_as
from paceline.data.prepare.isolated import Isolated, Unreadable
from paceline.errors import UserError

SOUND = jpeg(sample_image(40, 30))


def test_threads_share_processes_and_get_what_a_direct_call_gives() -> None:
    files = [jpeg(sample_image(40, 30 + number)) for number in range(12)]
    with Isolated(convert_as, [{}, {"max_side": 16}]) as convert, ThreadPoolExecutor(3) as pool:
        results = list(pool.map(convert, files, timeout=HANG))
        assert 1 <= len(convert._idle) <= 3
    assert results == [convert_as(content, [{}, {"max_side": 16}]) for content in files]


def test_an_image_that_takes_too_long_is_unreadable_and_the_next_one_is_not() -> None:
    with Isolated(convert_as, [{}], cpu_seconds=1) as convert:
        with pytest.raises(Unreadable, match="takes more than 1 s of processor time"):
            convert(slow_bmp(15_000))
        assert codec.describe(convert(SOUND)[0][0]) == (40, 30, 3)


def test_an_image_that_needs_too_much_memory_is_unreadable_and_the_next_one_is_not() -> None:
    with Isolated(convert_as, [{}], memory=50_000_000) as convert:
        with pytest.raises(Unreadable, match="memory"):
            convert(png_of(10_000, 10_000))
        assert codec.describe(convert(SOUND)[0][0]) == (40, 30, 3)


@pytest.mark.parametrize(
    ("end", "error", "says"),
    [
        (f"os.kill(os.getpid(), {signal.SIGSEGV:d})", Unreadable, "crashes the decoder .SIGSEGV."),
        (f"os.kill(os.getpid(), {signal.SIGKILL:d})", UserError, "was killed, .* fewer --workers"),
        ("os._exit(3)", Unreadable, "crashes the decoder .exit status 3."),
        ("os.write(1, b'[[5], null, 0]\\nabc')", Unreadable, "crashes the decoder"),
        ("os.write(1, b'nonsense\\n')", Unreadable, "crashes the decoder"),
    ],
)
def test_a_process_that_ends_is_told_by_how_it_ended(monkeypatch, end: str, error: type, says: str) -> None:
    program = f"import os, sys; os.write(1, b'\\n'); sys.stdin.buffer.read(8); {end}"
    monkeypatch.setattr(isolated, "_COMMAND", [sys.executable, "-c", program])
    with Isolated(convert_as, [{}]) as convert, pytest.raises(error, match=says):
        convert(SOUND)


def test_a_process_that_cannot_start_is_an_error(monkeypatch) -> None:
    monkeypatch.setattr(isolated, "_COMMAND", [sys.executable, "-c", "import nothing_of_this_name"])
    with Isolated(convert_as, [{}]) as convert, pytest.raises(UserError, match="could not be started"):
        convert(SOUND)


def test_a_machine_without_room_for_a_process_is_an_error_not_a_bad_file(monkeypatch) -> None:
    monkeypatch.setattr(isolated, "_COMMAND", ["/nowhere/python"])
    with Isolated(convert_as, [{}]) as convert, pytest.raises(UserError, match=r"could not be started .*--workers"):
        convert(SOUND)


def test_the_current_folder_is_not_searched_for_modules(tmp_path, monkeypatch) -> None:
    (tmp_path / "json.py").write_text("open('canary', 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    with Isolated(convert_as, [{}]) as convert:
        convert(SOUND)
    assert not (tmp_path / "canary").exists()
