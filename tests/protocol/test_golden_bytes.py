"""Are the bytes of the wire, of records and of journals those that pods and clients out there write and read?

Pods of a cluster are replaced one after another, clients when their image is built anew, and a journal outlives the pod
that wrote it: each reads what another version wrote. These are the bytes of today, written out.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from refill.errors import InvalidInput
from refill.protocol.records import Kind, Record, RecordReader, encode_records
from refill.protocol.wire_format import (
    FRAME_HEADER_BYTES,
    BatchRequest,
    FrameHeader,
    decode_frame_arrays,
    encode_frame_head,
)
from refill_service.journal import job_journal, kept_job
from refill_service.journal.job_files import VERSION
from refill_service.journal.journal import Journal

GOLDEN_JOURNAL = Path(__file__).parents[1] / "golden" / "journal"


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def golden(text: str) -> bytes:
    """Hex, with what it means behind ``#``."""
    return bytes.fromhex("".join(line.partition("#")[0] for line in text.splitlines()))


def check(what: str, found: bytes, expected: bytes, version: str) -> None:
    if found != expected:
        pytest.fail(
            f"{what} is written in other bytes than before, and other versions of pods and clients can't read them. If "
            f"that is meant: raise {version}, say in CHANGELOG.md what can't be mixed any more, and put these bytes "
            f"here:\n{found.hex(' ', 8)}\nThey were:\n{expected.hex(' ', 8)}"
        )


THE_MAGIC = "the number in its magic (client/refill/protocol/wire_format.py)"

REQUEST = golden("""
    52465131 01000000 03000000 01000000     # RFQ1, epoch 1, rank 3, one position
    0010000000000000                        # room_bytes 4096
    0a00000000000000                        # started_below 10
    0a00000000000000                        # ahead_from 10
    000000000000f83f                        # waited_seconds 1.5
    0900000000000000                        # position 9
""")
LISTED = REQUEST.replace(b"RFQ1", b"RFL1") + golden("""
    4600000000000000                        # sample 70 is wanted there
""")
ANNOUNCED = golden("""
    52464631 00000000                       # RFF1
    0100000000000000 0000000000000000       # one sample, no payload
    0c00000000000000                        # for position 12
    4700000000000000                        # sample 71
    0000000000000000                        # without its bytes
""")
ASKED = golden("""
    52464631 00000000
    0200000000000000 0500000000000000       # two samples, 5 bytes
    0900000000000000 0800000000000000       # for positions 9 and 8
    4600000000000000 ffffffff00000000       # samples 70 and 2**32 - 1
    0300000000000000 0200000000000000       # of 3 and 2 bytes
""")
WITHOUT_DAMAGED = golden("""
    52464631 00000000
    0200000000000000 0500000000000000       # two samples, 5 bytes
    0900000000000000 0800000000000000       # for positions 9 and 8
    4600000000000000 4700000000000000       # samples 70 and 71
    0300000000000000 feffffffffffffff       # of 3 bytes; and an error, as JSON, of 2
""")


class TestWire:
    def test_a_request(self) -> None:
        request = BatchRequest(1, 3, ids(9), room_bytes=4096, started_below=10, ahead_from=10, waited_seconds=1.5)
        check("a request", request.encode(), REQUEST, THE_MAGIC)
        assert BatchRequest.decode(REQUEST).encode() == REQUEST
        listed = request._replace(sample_ids=ids(70))
        check("a request that names its samples", listed.encode(), LISTED, THE_MAGIC)
        assert BatchRequest.decode(LISTED).encode() == LISTED

    def test_frames(self) -> None:
        check("a frame without payload", encode_frame_head(ids(12), ids(71), ids(0)), ANNOUNCED, THE_MAGIC)
        check("a frame", encode_frame_head(ids(9, 8), ids(70, 2**32 - 1), ids(3, 2)), ASKED, THE_MAGIC)
        header = FrameHeader.decode(ASKED)
        arrays = decode_frame_arrays(header, ASKED[FRAME_HEADER_BYTES:])
        assert [array.tolist() for array in arrays] == [[9, 8], [70, 2**32 - 1], [3, 2]]

    def test_a_frame_without_a_damaged_sample(self) -> None:
        found = encode_frame_head(ids(9, 8), ids(70, 71), ids(3, -2))
        check("a frame without a damaged sample", found, WITHOUT_DAMAGED, THE_MAGIC)
        arrays = decode_frame_arrays(FrameHeader.decode(found), found[FRAME_HEADER_BYTES:])
        assert arrays[2].tolist() == [3, -2]

    def test_another_version_is_refused_by_name(self) -> None:
        with pytest.raises(InvalidInput, match="not a request of this version"):
            BatchRequest.decode(REQUEST.replace(b"RFQ1", b"RFQ2"))
        with pytest.raises(InvalidInput, match="not a frame of this version"):
            FrameHeader.decode(ASKED.replace(b"RFF1", b"RFF2"))


RECORDS = [
    (
        Record(Kind.ANSWERED, 7, 0, (ids(5, 6), ids(6, 5))),
        """
        20000000 fd7f1632 01 00 cba4 07000000 00000000          # size, checksum, kind, zero, head, epoch, rank
        0500000000000000 0600000000000000                       # asked for 5 and 6
        0600000000000000 0500000000000000                       # answered by 6 and 5
        """,
    ),
    (
        Record(Kind.RECEIVED, 7, 3, (ids(0), ids(2**40))),
        "10000000 622179ed 02 00 6096 07000000 03000000 0000000000000000 0000000000010000",
    ),
    (Record(Kind.OPENED, 8, 3, (ids(1),)), "08000000 f7df88a9 03 00 c6cf 08000000 03000000 0100000000000000"),
    (
        Record(Kind.TRACE, 8, 2, (ids(4, 4, 0),)),
        "18000000 f818f61e 04 00 4a21 08000000 02000000 0400000000000000 0400000000000000 0000000000000000",
    ),
    (Record(Kind.WHOLE, 9, 1), "00000000 00000000 05 00 d390 09000000 01000000"),
    (Record(Kind.ALL_RANKS, 9, 1), "00000000 00000000 06 00 2342 09000000 01000000"),
    (Record(Kind.WHOLE_TABLE, 9, 1), "00000000 00000000 07 00 4c0e 09000000 01000000"),
    (Record(Kind.NOT_RECOVERING, 9, 1), "00000000 00000000 08 00 3d91 09000000 01000000"),
    (Record(Kind.WILL_RECOVER, 9, 1), "00000000 00000000 09 00 52dd 09000000 01000000"),
    (Record(Kind.UNKNOWN, 9, 1), "00000000 00000000 0a 00 a20f 09000000 01000000"),
    (Record(Kind.UNUSED, 9, 1), "00000000 00000000 0b 00 cd43 09000000 01000000"),
    (
        Record(Kind.DAMAGED, 7, 3, (ids(0), ids(5))),
        "10000000 31455ba4 0c 00 5e3e 07000000 03000000 0000000000000000 0500000000000000",
    ),
    (Record(Kind.PART, 0, 1), "00000000 00000000 0d 00 06fd 00000000 01000000"),
]


class TestRecords:
    @pytest.mark.parametrize(
        ("record", "text"), RECORDS, ids=lambda each: getattr(getattr(each, "kind", None), "name", "")
    )
    def test_a_record_of_each_kind(self, record: Record, text: str) -> None:
        version = "nothing, but give it a kind with a number of its own (client/refill/protocol/records.py)"
        check(f"a record {record.kind.name}", record.encode(), golden(text), version)
        (found,) = RecordReader(golden(text))
        assert found.encode() == golden(text)

    def test_no_kind_is_left_out(self) -> None:
        assert [record.kind for record, _ in RECORDS] == list(Kind)


NOTED = ids(1, 2, 3)


def write_journal(folder: Path) -> Journal:
    """Of a job that ran for two epochs. Pod 2 left a table here; this pod leaves one to pod 1."""
    header = {"spec": {"name": "run"}, "incarnation": "1f", "num_pods": 3, "num_samples": 20}
    journal = Journal(folder, 60.0)
    job = journal.begin("run", header, lambda epoch: [Record(Kind.OPENED, epoch, 0, (ids(0),))], [4])
    assert job is not None
    job.write(Record(Kind.ANSWERED, 4, 0, (ids(5, 6), ids(6, 5))))
    job.write(Record(Kind.ANSWERED, 5, 0, (ids(7), ids(7))))
    job.keep(2, encode_records([Record(Kind.RECEIVED, 5, 1, (ids(0), ids(9)))]))
    job.keep_receipt({"epoch": 3, "receipt": {"delivered": 20}})
    job.hands_over_to(1)
    asyncio.run(journal.close())
    return journal


class TestJournal:
    @pytest.fixture(autouse=True)
    def the_machine_has_a_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in (job_journal, kept_job):
            monkeypatch.setattr(module, "boot_id", lambda: "golden")

    def test_each_file(self, tmp_path: Path) -> None:
        write_journal(tmp_path)
        written = {str(path.relative_to(tmp_path)): path.read_bytes() for path in files_in(tmp_path)}
        known = {str(path.relative_to(GOLDEN_JOURNAL)): path.read_bytes() for path in files_in(GOLDEN_JOURNAL)}
        differ = sorted(name for name in written.keys() | known.keys() if written.get(name) != known.get(name))
        if differ:
            pytest.fail(
                f"{', '.join(differ)} of a job's journal is not as version {VERSION} has it, so that a pod of another "
                "version would misread it. If that is meant: raise VERSION (service/refill_service/journal/"
                "job_files.py), or read both, say in CHANGELOG.md what becomes of jobs that run during the upgrade, "
                f"and copy {tmp_path} to {GOLDEN_JOURNAL}"
            )

    def test_it_is_read(self, tmp_path: Path) -> None:
        for path in files_in(GOLDEN_JOURNAL):
            copy = tmp_path / path.relative_to(GOLDEN_JOURNAL)
            copy.parent.mkdir(exist_ok=True)
            copy.write_bytes(path.read_bytes())
        kept = Journal(tmp_path, 60.0).find("run")
        assert kept is not None
        assert kept.whole, kept.reason
        assert [(record.kind, record.epoch) for record in kept.records] == [
            (Kind.OPENED, 4),
            (Kind.ANSWERED, 4),
            (Kind.ANSWERED, 5),
            (Kind.RECEIVED, 5),
        ]
        assert kept.receipts == {3: {"epoch": 3, "receipt": {"delivered": 20}}}
        assert kept.handed_over_to == (1,)

    def test_one_of_another_version_is_not_used(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        write_journal(tmp_path)
        header = tmp_path / "job-run" / "job.json"
        header.write_text(header.read_text().replace(f'"version": {VERSION}', f'"version": {VERSION + 1}'))
        assert Journal(tmp_path, 60.0).find("run") is None
        assert f"it is of version {VERSION + 1}, and this pod reads version {VERSION}" in caplog.text


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "lock")
