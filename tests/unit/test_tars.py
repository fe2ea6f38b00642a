"""Members of tars are names and bytes; headers that claim too much are rejected before memory is allocated."""

import io

import pytest
from conftest import raises
from hostile import attributes, member, sparse, tar_of

from paceline.data.prepare.tars import archive

END = bytes(1024)


def read(content: bytes, limit: int = 1 << 20) -> dict[str, bytes]:
    return {found.name: found.read(limit) for found in archive(io.BytesIO(content), "some.tar")}


@pytest.mark.parametrize("compression", ["", "gz", "bz2", "xz"])
def test_files_are_read_back(compression: str) -> None:
    import bz2
    import gzip
    import lzma

    pack = {"": bytes, "gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}[compression]
    files = {"a.jpg": b"abc", "b.jpg": bytes(5000), "c" * 200: b"long"}
    assert read(pack(tar_of(files))) == files


def test_folders_of_names_are_dropped_and_links_and_devices_are_skipped() -> None:
    parts = [
        member(b"../../etc/passwd", 1, b"0", b"x"),
        member(b"/etc/shadow", 1, b"0", b"y"),
        *(member(b"kind" + kind, 0, kind, link=b"/etc/passwd") for kind in (b"1", b"2", b"3", b"4", b"5", b"6")),
    ]
    assert read(b"".join(parts) + END) == {"passwd": b"x", "shadow": b"y"}


def test_skipped_links_are_counted_once(caplog) -> None:
    content = tar_of({"a.jpg": b"abc"})[:1024] + member(b"b/h.jpg", 0, b"1", link=b"a.jpg") + END
    for _ in range(2):
        assert len(list(archive(io.BytesIO(content), "linked.tar"))) == 1
    (record,) = caplog.records
    assert "skipped 1 link, e.g. b/h.jpg" in record.getMessage()


def _corrupt(content: bytes, where: int) -> bytes:
    return content[:where] + bytes([content[where] ^ 1]) + content[where + 1 :]


WHOLE = tar_of({"a.jpg": b"abc", "b.jpg": b"def"})  # a header and a block of content for each, then the end


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(WHOLE[:1024], id="cut between two files"),
        pytest.param(WHOLE[: 1024 + 100], id="cut within a header"),
        pytest.param(WHOLE[:2048], id="without its end"),
        pytest.param(_corrupt(WHOLE, 1024 + 150), id="checksum of the second header"),
        pytest.param(_corrupt(WHOLE, 1024), id="name of the second file"),
        pytest.param(WHOLE + WHOLE, id="two archives"),
    ],
)
def test_incomplete_archives_are_errors(content: bytes) -> None:
    with raises("archive-corrupt"):
        read(content)


def test_claimed_size_is_rejected_without_reading() -> None:
    with raises("archive-member-too-large") as caught:
        read(member(b"a.jpg", 5 << 40) + END)
    assert caught.value.fields == {"path": "some.tar", "member": "a.jpg"}
    with raises("archive-corrupt") as caught:
        read(sparse(b"a.jpg", 5 << 40) + END)
    assert caught.value.fields == {"path": "some.tar"}
    assert "a.jpg is a sparse file" in str(caught.value)
    pax = attributes(GNU_sparse_major="0", GNU_sparse_minor="1", GNU_sparse_size=str(5 << 40), GNU_sparse_map="0,0")
    with raises("archive-corrupt") as caught:
        read(pax + member(b"a.jpg", 0) + END)
    assert "a.jpg is a sparse file" in str(caught.value)


@pytest.mark.parametrize("kind", [b"x", b"g", b"X", b"L", b"K"])
def test_size_of_headers_is_limited(kind: bytes) -> None:
    body = bytes(1 << 20)
    with raises("archive-corrupt") as caught:
        read(member(b"long", len(body), kind, body) + member(b"a.jpg", 0) + END)
    assert "1,048,576 bytes" in str(caught.value)


def test_negative_sizes_and_nested_headers_do_not_loop() -> None:
    for size in (-512, -1024, -(1 << 40)):
        with raises("archive-corrupt"):
            read(member(b"a", 0) + member(b"b", size) + END)
        with raises("archive-corrupt"):
            read(member(b"a", 0) + attributes(size=str(size)) + member(b"b", 0) + END)
    with raises("archive-corrupt"):
        read((member(b"long", 2, b"L", b"a\0") * 5000) + member(b"a", 0) + END)
    with raises("archive-corrupt"):
        read(attributes(GNU_sparse_major="1", GNU_sparse_minor="0") + member(b"a", 3, b"0", b"9\n1") + END)
