"""Members of tars are names and bytes; headers that claim more than there is are refused before memory is spent."""

import io

import pytest
from hostile import attributes, member, sparse, tar_of

from paceline.data.prepare.tars import archive
from paceline.errors import UserError

END = bytes(1024)


def read(content: bytes, limit: int = 1 << 20) -> dict[str, bytes]:
    return {found.name: found.read(limit) for found in archive(io.BytesIO(content), "some.tar")}


@pytest.mark.parametrize("compression", ["", "gz", "bz2", "xz"])
def test_files_come_back(compression: str) -> None:
    import bz2
    import gzip
    import lzma

    pack = {"": bytes, "gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}[compression]
    files = {"a.jpg": b"abc", "b.jpg": bytes(5000), "c" * 200: b"long"}
    assert read(pack(tar_of(files))) == files


def test_names_lead_nowhere_and_links_and_devices_are_passed_over() -> None:
    parts = [
        member(b"../../etc/passwd", 1, b"0", b"x"),
        member(b"/etc/shadow", 1, b"0", b"y"),
        *(member(b"kind" + kind, 0, kind, link=b"/etc/passwd") for kind in (b"1", b"2", b"3", b"4", b"5", b"6")),
    ]
    assert read(b"".join(parts) + END) == {"passwd": b"x", "shadow": b"y"}


def test_a_size_that_is_only_claimed_costs_nothing() -> None:
    with pytest.raises(UserError, match=r"some.tar: a.jpg has 5,?497.* GB, more than"):
        read(member(b"a.jpg", 5 << 40) + END)
    with pytest.raises(UserError, match=r"some.tar is not a complete tar archive .*a.jpg is a sparse file"):
        read(sparse(b"a.jpg", 5 << 40) + END)
    pax = attributes(GNU_sparse_major="0", GNU_sparse_minor="1", GNU_sparse_size=str(5 << 40), GNU_sparse_map="0,0")
    with pytest.raises(UserError, match=r"a.jpg is a sparse file"):
        read(pax + member(b"a.jpg", 0) + END)


@pytest.mark.parametrize("kind", [b"x", b"g", b"X", b"L", b"K"])
def test_headers_of_names_and_attributes_are_bounded(kind: bytes) -> None:
    body = bytes(1 << 20)
    with pytest.raises(UserError, match="a header of 1,048,576 bytes"):
        read(member(b"long", len(body), kind, body) + member(b"a.jpg", 0) + END)


def test_headers_that_lead_back_or_into_each_other_end() -> None:
    for size in (-512, -1024, -(1 << 40)):
        with pytest.raises(UserError, match="is not a complete tar archive"):
            read(member(b"a", 0) + member(b"b", size) + END)
        with pytest.raises(UserError, match="is not a complete tar archive"):
            read(member(b"a", 0) + attributes(size=str(size)) + member(b"b", 0) + END)
    with pytest.raises(UserError, match="is not a complete tar archive"):
        read((member(b"long", 2, b"L", b"a\0") * 5000) + member(b"a", 0) + END)
    with pytest.raises(UserError, match="is not a complete tar archive"):
        read(attributes(GNU_sparse_major="1", GNU_sparse_minor="0") + member(b"a", 3, b"0", b"9\n1") + END)
