"""tar_samples against tarfile, the oracle: what it reads, and what it refuses."""

from __future__ import annotations

import io
import random
import tarfile

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.draws import draws

from refill.errors import SampleDamaged
from refill.formats.tar_samples import parse_members, split_name

FORMATS = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]
BLOCK = 512

names = st.text(st.characters(exclude_characters="\0./", exclude_categories=("Cs",)), min_size=1, max_size=120)
folders = st.lists(names, max_size=2).map(lambda parts: "".join(f"{part}/" for part in parts))
extensions = st.lists(
    st.text("abcdefgh0123.", min_size=1, max_size=12).filter(lambda text: not text.startswith(".")),
    min_size=1,
    max_size=4,
    unique=True,
)


def tar_range(members: list[tuple[str, bytes]], format: int = tarfile.PAX_FORMAT) -> bytes:
    """Headers and data, without the blocks that end an archive."""
    pieces = []
    for name, content in members:
        info = tarfile.TarInfo(name)
        info.size = len(content)
        pieces += [info.tobuf(format), content, bytes(-len(content) % BLOCK)]
    return b"".join(pieces)


def as_bytes(members: dict[str, memoryview]) -> dict[str, bytes]:
    return {extension: bytes(view) for extension, view in members.items()}


@draws(150)
@given(folders, names, extensions, st.lists(st.binary(max_size=1500), min_size=4, max_size=4), st.sampled_from(FORMATS))
def test_what_tarfile_writes_is_read(
    folder: str, stem: str, exts: list[str], contents: list[bytes], format: int
) -> None:
    members = [(f"{folder}{stem}.{ext}", content) for ext, content in zip(exts, contents, strict=False)]
    try:
        raw = tar_range(members, format)
    except ValueError:  # a name that the plain format can't hold
        raw = tar_range(members, tarfile.PAX_FORMAT)
    with tarfile.open(fileobj=io.BytesIO(raw)) as oracle:
        read_back = {member.name: oracle.extractfile(member).read() for member in oracle}  # type: ignore[union-attr]
    key, found = parse_members(memoryview(raw), 0)
    assert {f"{key}.{ext}": bytes(view) for ext, view in found.items()} == read_back == dict(members)


@draws(300)
@given(st.integers(0, 2**32), st.sampled_from(FORMATS))
def test_damaged_bytes_are_refused_or_read_as_a_sample(seed: int, format: int) -> None:
    made = random.Random(seed)
    raw = bytearray(
        tar_range(
            [("d" * 90 + "/" + "k" * 90 + ".jpg", made.randbytes(700)), ("d" * 90 + "/" + "k" * 90 + ".cls", b"7")],
            tarfile.PAX_FORMAT,
        )
    )
    for _ in range(made.randint(1, 4)):
        raw[made.randrange(len(raw))] = made.randrange(256)
    data = memoryview(raw)[: made.choice([len(raw), made.randrange(len(raw) + 1)])]
    error: SampleDamaged | None = None
    try:
        _, members = parse_members(data, 5)
    except SampleDamaged as damage:
        members, error = {}, damage
    assert all(len(view) <= len(data) for view in members.values())
    if error is not None:
        assert error.details["sample"] == 5
        assert str(error).startswith("sample 5 ")


@draws(200)
@given(st.integers(0, BLOCK - 1), st.integers(0, 255))
def test_no_changed_byte_of_a_header_goes_unnoticed(at: int, value: int) -> None:
    raw = bytearray(tar_range([("a.txt", b"hello")], tarfile.USTAR_FORMAT))
    intact = parse_members(memoryview(bytes(raw)), 0)
    in_checksum = 148 <= at < 156  # the same number may be written in another way
    changed = raw[at] != value
    raw[at] = value
    try:
        found = parse_members(memoryview(raw), 0)
    except SampleDamaged:
        found = None
    assert found == intact if not changed else found is None or (in_checksum and found == intact)


@pytest.mark.parametrize("cut", [1, 100, 511, 513, 1000])
def test_a_cut_range_is_refused(cut: int) -> None:
    raw = tar_range([("a.txt", bytes(600))])
    with pytest.raises(SampleDamaged, match="sample 3 is no tar range, at its byte 0"):
        parse_members(memoryview(raw)[:cut], 3)


def test_the_padding_of_the_last_member_may_be_missing() -> None:
    raw = tar_range([("a.txt", b"hello")])[: BLOCK + 5]
    assert as_bytes(parse_members(memoryview(raw), 0)[1]) == {"txt": b"hello"}


def test_the_end_of_an_archive_is_no_sample_and_no_damage() -> None:
    raw = tar_range([("a.txt", b"hello")])
    assert as_bytes(parse_members(memoryview(raw + bytes(2 * BLOCK)), 0)[1]) == {"txt": b"hello"}
    with pytest.raises(SampleDamaged, match="zeros where a member should begin"):
        parse_members(memoryview(raw + bytes(BLOCK) + raw), 0)
    with pytest.raises(SampleDamaged, match="no file with an extension"):
        parse_members(memoryview(b""), 0)


def test_what_is_no_file_is_passed_over() -> None:
    folder, link = tarfile.TarInfo("d"), tarfile.TarInfo("d/a.link")
    folder.type, link.type, link.linkname, link.size = tarfile.DIRTYPE, tarfile.SYMTYPE, "x" * 150, 77
    raw = b"".join(
        [
            folder.tobuf(),
            link.tobuf(tarfile.GNU_FORMAT),
            tar_range([("README", b"-"), (".hidden", b"-"), ("d/a.TXT", b"hello")]),
        ]
    )
    key, members = parse_members(memoryview(raw), 0)
    assert (key, as_bytes(members)) == ("d/a", {"txt": b"hello"})


def test_members_of_two_samples_are_refused() -> None:
    with pytest.raises(SampleDamaged, match=r"'b.txt' is of another sample than 'a'"):
        parse_members(memoryview(tar_range([("a.txt", b""), ("b.txt", b"")])), 0)
    with pytest.raises(SampleDamaged, match="there twice"):
        parse_members(memoryview(tar_range([("a.txt", b""), ("a.TXT", b"")])), 0)


def test_sizes_in_pax_headers_and_base_256_count() -> None:
    info = tarfile.TarInfo("a.bin")
    info.pax_headers = {"size": "5"}
    pax = info.tobuf(tarfile.PAX_FORMAT) + b"hello" + bytes(507)
    assert as_bytes(parse_members(memoryview(pax), 0)[1]) == {"bin": b"hello"}
    header = bytearray(tarfile.TarInfo("a.bin").tobuf(tarfile.USTAR_FORMAT))
    header[124:136] = b"\x80" + (5).to_bytes(11, "big")
    header[148:156] = b"%06o\0 " % (sum(header[:148]) + 8 * 32 + sum(header[156:]))
    assert as_bytes(parse_members(memoryview(bytes(header) + b"hello"), 0)[1]) == {"bin": b"hello"}


def test_old_writers_sums_of_signed_bytes_are_read() -> None:
    header = bytearray(tarfile.TarInfo("\u00e9.bin").tobuf(tarfile.USTAR_FORMAT))
    signed = sum(byte - 256 if byte > 127 else byte for byte in header[:148] + b" " * 8 + header[156:])
    header[148:156] = b"%06o\0 " % signed
    assert parse_members(memoryview(header), 0)[0] == "\u00e9"


def test_members_are_views_not_copies() -> None:
    raw = bytearray(tar_range([("a.txt", b"hello")]))
    members = parse_members(memoryview(raw), 0)[1]
    raw[BLOCK] = ord("H")
    assert bytes(members["txt"]) == b"Hello"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.jpg", ("a", "jpg")),
        ("d.e/a.SEG.png", ("d.e/a", "seg.png")),
        ("a.", ("a", "")),
        ("a", None),
        (".a", None),
        ("d.e/a", None),
        ("d/.a", ("d/", "a")),
    ],
)
def test_names_are_split_as_webdataset_does(name: str, expected: tuple[str, str] | None) -> None:
    assert split_name(name) == expected
