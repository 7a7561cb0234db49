"""Everything that reads bytes of strangers, each with what it may raise: errors of ours, which have a name.

Beside each, inputs as they come from those who mean well: what a fuzzer begins with.
"""

from __future__ import annotations

import io
import json
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.requests import Request
from tests.formats.array_files import BLOCK, array_file
from tests.formats.array_files import chunk as array_chunk
from tests.formats.in_memory import parsed_in_memory

from refill.errors import InvalidInput, RefillError, error_from_wire
from refill.formats import parser_of
from refill.formats.arrayrecord import make_parser as arrayrecord_parser
from refill.formats.clips import FRAME_HEAD, Cut, cut_window
from refill.formats.cut import cut_format
from refill.formats.jsonl import make_parser as jsonl_parser
from refill.formats.litdata import make_parser as litdata_parser
from refill.formats.mds import make_parser as mds_parser
from refill.formats.parsed import Coded
from refill.formats.rows import make_parser as rows_parser
from refill.formats.tar_samples import parse_members
from refill.formats.tfrecord import kind_of
from refill.formats.tfrecord import make_parser as tfrecord_parser
from refill.pods.answer_checks import checked_job, decoded
from refill.pods.received_batch import Expected, decode_frame
from refill.pods.resume_state import ResumeState
from refill.protocol.column_values import decode_values
from refill.protocol.crc32c import crc32c, masked
from refill.protocol.job_spec import JobSpec
from refill.protocol.plan_settings import PlanSettings
from refill.protocol.position_set import PositionSet
from refill.protocol.rank_life import RankLife
from refill.protocol.receipt_digest import DigestPart
from refill.protocol.sample_cut import SampleCut
from refill.protocol.wire_format import BatchRequest, decode_together, encode_frame_head, encode_together
from refill_service.cache_core import dataset_columns
from refill_service.cache_core.dataset_index import BlobTable, IndexHeader, decode_header, decode_index, encode_head
from refill_service.cache_core.dataset_labels import summary_in
from refill_service.cache_core.kept_runs import RunPart
from refill_service.cache_core.planned.received import packed_spans, spans_in
from refill_service.formats.interface import Options
from refill_service.formats.mp4 import Mp4Damaged, frames_of, moov_range
from refill_service.formats.rows import GroupDamaged
from refill_service.jobs.scores import read_scores
from refill_service.object_store.hub_store import listed
from refill_service.object_store.store_url import parse_url
from refill_service.object_store.web_client import WebAnswer, joined, origin_of, seconds_to_wait
from refill_service.serving.client_requests import parsed_query, query_of, read_int64s
from refill_service.serving.cut_samples import cut_samples, cutter_of
from refill_service.serving.door import PodNames
from refill_service.serving.planned_routes import AskedForBatch, ListPiece, Received, job_and_query
from refill_service.serving.tokens import Tokens
from refill_service.settings import load_settings

__all__ = ["OF_FORMATS", "PARSERS", "Parser", "foreign"]

CORPUS = Path(__file__).parent / "corpus"


class Parser(NamedTuple):
    parse: Callable[[bytes], object]
    begin_with: Sequence[bytes] | Callable[[], Sequence[bytes]]
    raises: tuple[type[Exception], ...] = ()
    """Beside errors of ours: what its caller turns into one, as its docstring says."""

    def begins(self) -> Sequence[bytes]:
        """What is right, and is read without an error."""
        return self.begin_with() if callable(self.begin_with) else self.begin_with

    def inputs(self, name: str) -> list[bytes]:
        """And those that were once found to do something new."""
        folder = CORPUS / name
        kept = [path.read_bytes() for path in sorted(folder.iterdir())] if folder.is_dir() else []
        return [*self.begins(), *kept]


def foreign(parser: Parser, data: bytes) -> BaseException | None:
    """What is raised that is no error of ours; None: nothing."""
    try:
        parser.parse(data)
    except (RefillError, *parser.raises):
        return None
    except Exception as error:
        return error
    return None


def _of_json(parse: Callable[[Any], object]) -> Callable[[bytes], object]:
    """JSON is decoded by whoever reads a body or an answer; here is what is made of it."""

    def parsed(data: bytes) -> object:
        try:
            given = decoded(data)
        except ValueError:
            return None
        return parse(given)

    return parsed


def _of_dict(parse: Callable[[dict[str, Any]], object]) -> Callable[[bytes], object]:
    return _of_json(lambda given: parse(given) if isinstance(given, dict) else None)


def _text(parse: Callable[[str], object]) -> Callable[[bytes], object]:
    return lambda data: parse(data.decode("latin-1"))


def _header(metadata_bytes: int, num_blobs: int, names_bytes: int, metadata: bytes, table: bytes) -> IndexHeader:
    checksums = xxhash.xxh3_64_intdigest(metadata), xxhash.xxh3_64_intdigest(table)
    return IndexHeader("index", 3, num_blobs, 30, metadata_bytes, names_bytes, 24, 512, 1, *checksums)


def _index_head() -> bytes:
    blobs = BlobTable(["a"], np.array([0, 3]), np.array([30]))
    return encode_head(blobs, sample_bytes=30, fingerprint=1, wide=False, metadata={})[1]


def _index_sections(data: bytes) -> object:
    """What has right checksums, and says whatever it likes. The first bytes say how long its parts are."""
    metadata_bytes, num_blobs = (data[0] if data else 0), (data[1] % 8 if len(data) > 1 else 0)
    sections = data[2:]
    table = sections[metadata_bytes:]
    names_bytes = max(0, len(table) - 8 * (3 * num_blobs + 1))
    header = _header(metadata_bytes, num_blobs, names_bytes, sections[:metadata_bytes], table)
    index = decode_index(header, sections)
    return summary_in(index.metadata)


def _column(data: bytes) -> object:
    table = dataset_columns.decode_table(data[:48], 3, 1, "x")
    return dataset_columns.block_body(memoryview(data)[48:], 0, 1, f"{len(table)}")


def _web_answer(data: bytes) -> object:
    """Of a server that says whatever it likes: its headers, a line each."""
    names = ("content-range", "content-length", "location", "retry-after", "etag", "last-modified", "ratelimit")
    headers = dict(zip(names, data.decode("latin-1").split("\n"), strict=False))
    answer = WebAnswer(206, headers, memoryview(b""))
    target = joined("https://hub/a/b", headers.get("location", ""))
    said = answer.first_byte, answer.size_bytes, replace(answer, status=200).size_bytes, answer.version
    return said, origin_of(target), origin_of(headers.get("location", "")), seconds_to_wait(answer)


def _names(data: bytes) -> object:
    """Of the host that is asked, and of the page that asks."""
    host, _, origin = data.partition(b"\n")
    scope = {"server": ("127.0.0.1", 80), "headers": [(b"host", host), (b"origin", origin)]}
    return PodNames(load_settings(host="127.0.0.1")).foreign_in(scope)


def _tokens(data: bytes) -> object:
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        return Tokens(Path(file.name), 1.0).holder_of(data)


def _settings(data: bytes) -> object:
    lines = data.decode("latin-1").replace("\0", "").splitlines()
    names = ("memory_bytes", "pod_urls", "peer_urls", "dataset_urls", "wait_seconds", "ordinal", "log_level")
    return load_settings(**dict(zip(names, lines, strict=False)))


def _query(data: bytes) -> object:
    return query_of(Request({"type": "http", "query_string": data, "headers": []}), AskedForBatch)


def _cut(data: bytes) -> object:
    members, _, ranges = data.decode("utf-8", "surrogateescape").partition("\n")
    return SampleCut.parse(members, ranges).query()


def _cut_sample(data: bytes) -> object:
    """What is sent of it can be read as it could."""
    for cut in (SampleCut(("jpg",), (("jpg", 1, 1),)), SampleCut((), (("jpg", 0, 2),))):
        (sent,) = cut_samples(cut, {}, [0], [data])
        try:
            key, members = parse_members(memoryview(data), 0)
        except RefillError:
            assert sent == data
            continue
        wanted = {name: bytes(view) for name, view in members.items() if name == "jpg" or not cut.members}
        if "jpg" in wanted:
            (_, start, length), *_ = cut.ranges
            wanted["jpg"] = wanted["jpg"][start : start + length]
        assert parse_members(memoryview(sent), 0) == (key, wanted)
    return None


def _cut_fields(about: dict[str, Any], *cuts: SampleCut) -> Callable[[bytes], object]:
    """What is sent of a sample is what a parser of all of it finds, less the rest."""

    def cut_and_parsed(data: bytes) -> object:
        for cut in cuts:
            try:
                sent = cutter_of(about, cut)(memoryview(data))
            except InvalidInput:  # of an archive without the members
                continue
            try:
                _, fields = parser_of({"format": about})(memoryview(data), 0)
            except RefillError:
                with suppress(RefillError):
                    parser_of({"format": cut_format(about, cut)})(memoryview(sent), 0)
                continue
            wanted = {name: _bytes_in(value) for name, value in fields.items() if name in cut.members}
            for name, start, length in cut.ranges:
                if isinstance(value := wanted.get(name), bytes):
                    wanted[name] = value[start : start + length]
            _, found = parser_of({"format": cut_format(about, cut)})(memoryview(sent), 0)
            assert {name: _bytes_in(value) for name, value in found.items()} == wanted
        return None

    return cut_and_parsed


_OF_VALUES = {"name": "mds", "columns": [["b", "bytes", None], ["n", "int", 8], ["t", "str", None]]}
_OF_ROWS = {"name": "parquet", "columns": [["b", "bytes"], ["n", "int64"], ["t", "str"]]}


def _bytes_in(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    return bytes(getattr(value, "data", value)) if isinstance(value, (memoryview, Coded)) else value


def _frame(data: bytes) -> object:
    return decode_frame(memoryview(data), Expected(positions=np.arange(2)), "http://pod-0")


def _tar_member(name: bytes, content: bytes, kind: bytes = b"0") -> bytes:
    header = name.ljust(100, b"\0") + b"0000644\0" + b"0000000\0" * 2 + b"%011o\0" % len(content) + b"0" * 11 + b"\0"
    header += b" " * 8 + kind + b"\0" * 100 + b"ustar\x0000"
    header = header.ljust(512, b"\0")
    header = header[:148] + b"%06o\0 " % sum(header) + header[156:]
    return header + content.ljust(-(-len(content) // 512) * 512, b"\0")


def _files(
    *names: str,
    tokens: int | None = None,
    name: str | None = None,
    checksums: str | None = None,
    windows: tuple[int, int] | None = None,
) -> Callable[[bytes], object]:
    """A folder with these files, their contents with a mark between them, indexed and parsed."""

    def parsed(data: bytes) -> object:
        contents = data.split(_MARK, len(names) - 1)
        objects = dict(zip(names, [*contents, *[b""] * len(names)], strict=False))
        stride = None if tokens is None else -(-tokens // 2)
        options = Options(tokens, stride, windows=windows, checksums=checksums)
        return parsed_in_memory(objects, options, name)

    return parsed


def _mp4(frames: int) -> bytes:
    """A keyframe, and one that needs it, in turns."""
    entry = (90).to_bytes(4, "big") + b"avc1" + bytes(82)
    coded = [FRAME_HEAD.pack(place, 0, 90 * (1 - place % 2)) + entry[: 90 * (1 - place % 2)] for place in range(frames)]
    rows = [{"c": memoryview(head + bytes([place]))} for place, head in enumerate(coded)]
    return bytes(cut_window(rows, Cut(frames, frames, ["c"], 10))[1]["c"])


def _coded_rows(count: int) -> bytes:
    """Rows with a number, and a frame as it is coded, a keyframe each two."""
    found = b""
    for place in range(count):
        entry = ((90).to_bytes(4, "big") + b"avc1" + bytes(82))[: 90 * (1 - place % 2)]
        frame = FRAME_HEAD.pack(place, 0, len(entry)) + entry + b"x"
        found += struct.pack("<BqI", 0, place, len(frame)) + frame
    return found


def _window(data: bytes) -> object:
    about = {"columns": [["n", "int64"], ["c", "video"]], "windows": [4, 2], "fps": 10}
    return rows_parser(about)(memoryview(data), 0)


def _lerobot() -> bytes:
    """An episode of 8 frames: its table, its video, and what says where they lie."""
    info = {"codebase_version": "v2.1", "fps": 10, "features": {"c": {"dtype": "video"}}, "chunks_size": 1000}
    info |= {"data_path": "data/{episode_index:01d}.parquet", "video_path": "videos/{video_key}/{episode_index}.mp4"}
    out = io.BytesIO()
    times = np.arange(8, dtype=np.float32) / 10
    pq.write_table(pa.table({"episode_index": [0] * 8, "timestamp": times}), out, compression="none")
    return _MARK.join([_json(**info), out.getvalue(), _mp4(8)])


def _moov(data: bytes) -> object:
    start, end = moov_range(len(data), lambda low, high: memoryview(data)[low:high])
    return frames_of(memoryview(data)[start:end])


def _mds() -> bytes:
    rows = [struct.pack("<IIq", 1, 2, 7) + b"x[]"] * 2
    data = struct.pack("<4I", 2, 18, 37, 56) + b"{}" + b"".join(rows)
    columns = {"column_names": ["a", "b", "c"], "column_encodings": ["str", "json", "int"]}
    raw = {"basename": "0.mds", "bytes": len(data), "hashes": {}}
    shard = {"format": "mds", "samples": 2, "raw_data": raw, "zip_data": None, "column_sizes": [None, None, 8]}
    return _json(version=2, shards=[shard | columns]) + _MARK + data


def _tfrecord(record: bytes) -> bytes:
    length = struct.pack("<Q", len(record))
    return length + struct.pack("<I", masked(crc32c(length))) + record + struct.pack("<I", masked(crc32c(record)))


def _tf_example(data: bytes) -> object:
    kind_of(memoryview(data), len(data))
    return tfrecord_parser({"holds": "Example"})(memoryview(_tfrecord(data)), 0)


def _arrayrecord(data: bytes) -> object:
    """Records and footer, and what the last block says; the padding is not given."""
    start, _, last = data.partition(_MARK)
    whole = start + bytes(-len(start) % BLOCK) + last[:BLOCK].ljust(BLOCK, b"\0")
    return parsed_in_memory({"a.array_record": whole}, Options())


def _array_parts(records: list[bytes]) -> bytes:
    whole = array_file(records)
    said = whole[:-BLOCK].rstrip(b"\0")
    return said + b"\0" + _MARK + whole[-BLOCK:].rstrip(b"\0")


def _array_packed() -> bytes:
    """By zstd, a frame of three plain bytes."""
    frame = bytes.fromhex("28b52ffd2003190000616263")
    return array_chunk([b"\3" + frame], packing=0x7A, num_bytes=3)


def _megatron() -> bytes:
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 2, 1)
    return head + struct.pack("<iiqqq", 3, 2, 0, 6, 0) + _MARK + bytes(10)


def _npy() -> bytes:
    header = b"{'descr': '<u2', 'fortran_order': False, 'shape': (20,)}".ljust(118)
    return b"\x93NUMPY\1\0\x76\0" + header + bytes(40)


def _litdata() -> bytes:
    rows = [struct.pack("<IIq", 8, 1, 7) + b"x"] * 2
    chunk = struct.pack("<4I", 2, 16, 33, 50) + b"".join(rows)
    leaf = {"type": None, "context": None, "children_spec": []}
    spec = {"type": "builtins.dict", "context": '["a", "b"]', "children_spec": [leaf, leaf]}
    return _litdata_index(len(chunk), 2, None, "PyTreeLoader", ["int", "str"], spec) + _MARK + chunk


def _litdata_tokens() -> bytes:
    chunk = struct.pack("<3I", 1, 12, 32) + bytes(20)
    return _litdata_index(len(chunk), 1, 10, "TokensLoader", ["no_header_tensor:20"], {}) + _MARK + chunk


def _litdata_index(num_bytes: int, items: int, dim: int | None, loader: str, kinds: list[str], spec: Any) -> bytes:
    config = {"item_loader": loader, "data_format": kinds, "data_spec": json.dumps([1, spec])}
    chunk = {"filename": "chunk-0.bin", "chunk_bytes": num_bytes, "chunk_size": items, "dim": dim}
    return _json(chunks=[chunk], config=config)


def _every_leaf(data: bytes) -> object:
    """The same of a kind of LitData's leaves."""
    kind = ("tensor", "numpy", "json", "pil", "no_header_tensor:18", "int")[data[0] % 6] if data else "str"
    parse = litdata_parser({"leaves": [["x", kind]]})
    return parse(memoryview(struct.pack("<I", len(data[1:])) + data[1:]), 0)


def _every_column(data: bytes) -> object:
    """One encoding of MDS, which the first byte says, of the rest."""
    encoding = _MDS_ENCODINGS[data[0] % len(_MDS_ENCODINGS)] if data else "str"
    parse = mds_parser({"columns": [["x", encoding, None]]})
    return parse(memoryview(struct.pack("<I", len(data[1:])) + data[1:]), 0)


_MARK = b"|##|"
_MDS_ENCODINGS = (
    "str", "int", "ndarray", "ndarray:int32", "ndarray:int32:2,2", "float32", "str_int", "str_float", "str_decimal",
    "pil", "jpeg_array", "list[pil]", "list[jpeg]", "json",
)  # fmt: skip
_EXAMPLE = (
    b"\x0a\x1d\x0a\x0a\x0a\x01a\x12\x05\x0a\x03\x0a\x01x"
    b"\x0a\x0f\x0a\x01b\x12\x0a\x1a\x08\x0a\x06\x01\x7f\xff\x01\x00\x05"
)


def _run_part() -> bytes:
    about = {"job": "x", "run": "y", "team": "", "pod": 0, "num_pods": 1, "ended_at": 1.0, "epochs": [0]}
    return RunPart(about, zlib.compress(b'{"epoch": 0}')).encode()


def _parquet(*, lists: bool = False, **more: Any) -> bytes:
    out = io.BytesIO()
    pq.write_table(_table(lists=lists), out, row_group_size=5, data_page_size=60, **more)
    return out.getvalue()


def _arrow(kind: Callable[..., Any], *, lists: bool = False) -> bytes:
    out = io.BytesIO()
    with kind(out, _table(lists=lists).schema) as writer:
        writer.write_table(_table(lists=lists), max_chunksize=5)
    return out.getvalue()


def _table(*, lists: bool) -> pa.Table:
    """:param lists: whether some are of more than numbers, which no header says the length of."""
    more = {"turns": [[{"role": "u", "words": ["a", None]}], None, [], [None], [], [], []]} if lists else {}
    return pa.table(
        {
            **more,
            "n": [1, None, 3, 4, 5, 6, 7],
            "t": ["a", "b", None, "dd", "a", "a", ""],
            "l": pa.array([[1], [], None, [2, 3], [4], [5], [6]], pa.list_(pa.int16())),
            "s": pa.array([{"bytes": b"x", "path": None}] * 7, pa.struct({"bytes": pa.binary(), "path": pa.string()})),
            "b": [True, False, None] * 2 + [True],
        }
    )


def _zip(names: tuple[str, ...]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name in names:
            with archive.open(name, "w", force_zip64=name.endswith("y")) as member:
                member.write(b"abc")
    return out.getvalue()


def _row(data: bytes) -> object:
    """Of as many columns as the first byte says."""
    kinds = ["int32", "str", "image", "list:float32", "bool", "list:bool", "bytes", "float16"]
    count = 1 + data[0] % 8 if data else 8
    parse = rows_parser({"columns": [[str(place), kind] for place, kind in enumerate(kinds[:count])]})
    return parse(memoryview(data[1:]), 0)


def _json(**given: Any) -> bytes:
    return json.dumps(given).encode()


_TWO = np.arange(2)
_PLAN = {"version": 1, "dataset": "0" * 16, "num_samples": 100, "chunk_size": 4, "num_shares": 2, "memory_bytes": 50}
_REPORT = {"epoch": 0, "rank": 0, "num_ranks": 1, "spans": [[0, 3]], "damaged": [[1, 2]], "digests": [[1]]}
_STATE = {"version": 1, "job": "x", "dataset": "0", "incarnation": "y", "world_size": 1, "rank": 0, "epoch": 0}
_BLOBS = np.array([30, 0, 3, 1], dtype="<i8").tobytes() + b"a"

PARSERS: dict[str, Parser] = {
    # Of clients.
    "batch_request": Parser(
        BatchRequest.decode,
        [BatchRequest(1, 0, _TWO).encode(), BatchRequest(1, 0, _TWO, sample_ids=_TWO).encode()],
    ),
    "together": Parser(
        decode_together,
        [encode_together([("/v1/jobs/x/planned/batch?plan=abc", BatchRequest(1, 0, _TWO).encode())] * 2)],
    ),
    "job_and_query": Parser(lambda path: job_and_query(path.decode("latin-1")), [b"/v1/jobs/x/planned/batch?plan=abc"]),
    "int64s": Parser(read_int64s, [_TWO.astype("<i8").tobytes()]),
    "query": Parser(_query, [b"plan=abc&ranks=2&batch=8&life=x-1-2", b"plan=%ff&part=true"], (RequestValidationError,)),
    "job_spec": Parser(
        _of_dict(JobSpec.from_dict),
        [_json(name="x", dataset="s3://b/x", chunk_size=8, policy="planned", policy_settings={"shares": 2})],
    ),
    "plan_settings": Parser(_of_json(PlanSettings.from_dict), [_json(**_PLAN, run=4, seed=0, selection="")]),
    "digest_part": Parser(
        _of_json(DigestPart.from_list),
        [b'[2, 8, 0, false, 1, [[0, 3], [5, 9]], "ab"]'],
    ),
    "received": Parser(lambda data: Received.model_validate_json(data), [_json(**_REPORT)], (ValidationError,)),
    "scores": Parser(lambda data: read_scores(data, 3), [_TWO.astype("<i8").tobytes() + struct.pack("<2f", 0.5, 2)]),
    "list_piece": Parser(
        lambda data: parsed_query(data, ListPiece).about(1),
        [b"num_ranks=2&length=9&start=1&digest=ab&first=3"],
        (RequestValidationError,),
    ),
    "pod_names": Parser(
        _names, [b"localhost:8000\nhttp://127.0.0.1:8000", b"[::1]:80\nnull", b"a.example\nhttps://[x"]
    ),
    "rank_life": Parser(_text(RankLife.decode), [RankLife("host", 1, 2, "0" * 12).encode().encode()]),
    "store_url": Parser(
        _text(parse_url),
        [
            b"s3://bucket/a/b%20c",
            b"file:///data/./x",
            b"https://h:80/a%20b",
            b"hf://datasets/a/b@c%2Fd/e",
            b"az://bucket/a-b/c",
        ],
    ),
    # Of pods, at clients and at other pods.
    "frame": Parser(_frame, [encode_frame_head(_TWO, _TWO, np.array([1, 2])) + b"abc"]),
    "answer": Parser(
        _of_dict(lambda given: checked_job(given, "http://pod-0")),
        [_json(pods=["http://pod-0"], incarnation="x", num_samples=3, metadata={}, plan=None)],
    ),
    "error": Parser(
        _of_json(lambda given: error_from_wire(given, status=503, source="http://pod-0")),
        [_json(error="StoreUnavailable", message="x", details={"pod": 0})],
    ),
    "spans": Parser(
        lambda data: spans_in(data.decode("latin-1")), [packed_spans(PositionSet([(0, 3), (5, 9)])).encode()]
    ),
    # Of web servers, and of the Hub.
    "web_answer": Parser(
        _web_answer,
        [
            b'bytes 0-9/100\n100\nhttps://hub/x\n17\n"abc"\nMon, 01 Jan 2024 00:00:00 GMT\n"api";r=0;t=60',
            b"bytes */7\n\n//[x\nMon, 01 Jan 0001 00:00:00 -0000",
        ],
    ),
    "hub_listing": Parser(
        lambda data: listed(data, 2),
        [b'[{"type":"file","path":"a/b","size":3,"oid":"x","lfs":{"oid":"y"}},{"type":"directory"}]'],
        (ValueError,),
    ),
    "run_part": Parser(RunPart.decode, [_run_part()], (ValueError, KeyError, TypeError)),
    "sample_cut": Parser(_cut, [b"json,mp4\nmp4:0:65536", b"mp4\nmp4:5:7"]),
    # Of datasets.
    "index_header": Parser(lambda data: decode_header(data, "index"), [_index_head()]),
    "index_sections": Parser(_index_sections, [bytes([2, 1]) + b"{}" + _BLOBS]),
    "column": Parser(
        _column, [dataset_columns.encode_head([20], 3, 1) + dataset_columns.encode_block(b"tx" + bytes(10), 0, 1)]
    ),
    "column_values": Parser(
        lambda data: decode_values(memoryview(data), 2), [b"i8" + bytes(16), b"tx" + bytes(8)], (ValueError,)
    ),
    "tar_members": Parser(
        lambda data: parse_members(memoryview(data), 0),
        [
            _tar_member(b"a.jpg", b"xyz") + _tar_member(b"a.cls", b"3"),
            _tar_member(b"p", b"19 path=long/a.jpg\n", b"x") + _tar_member(b"a.jpg", b"xyz"),
            _tar_member(b"l", b"long/a.jpg\0", b"L") + _tar_member(b"a.jpg", b"xyz"),
        ],
    ),
    "cut_sample": Parser(
        _cut_sample,
        [
            _tar_member(b"a.jpg", b"xyz") + _tar_member(b"a.cls", b"3"),
            _tar_member(b"p", b"19 path=long/a.jpg\n", b"x") + _tar_member(b"a.jpg", b"xyz"),
        ],
    ),
    "cut_values": Parser(
        _cut_fields(_OF_VALUES, SampleCut(("b", "n"), (("b", 1, 2),)), SampleCut(("t",))),
        [struct.pack("<2I", 3, 2) + b"abc" + struct.pack("<q", 7) + b"hi"],
    ),
    "cut_row": Parser(
        _cut_fields(_OF_ROWS, SampleCut(("b", "n"), (("b", 1, 2),)), SampleCut(("t",))),
        [struct.pack("<BIqI", 0, 3, 7, 2) + b"abchi", struct.pack("<BIqI", 5, 0, 7, 0)],
    ),
    "cut_archive": Parser(
        _cut_fields({"name": "zip", "whole": False}, SampleCut(("jpg",), (("jpg", 1, 2),)), SampleCut(("cls", "jpg"))),
        [_zip(("1.jpg", "1.cls"))[:76]],
    ),
    # Of datasets in formats of others.
    "mds": Parser(_files("index.json", "0.mds", name="mds"), [_mds()]),
    "mds_columns": Parser(
        _every_column,
        [
            bytes([2]) + b"\x21\x08\x01\x02" + bytes(8),
            bytes([9]) + struct.pack("<3I", 1, 1, 3) + b"RGBabc",
            bytes([12]) + struct.pack("<4I", 0, 2, 1, 2) + b"abc",
            bytes([13]) + b'{"a": [1]}',
        ],
    ),
    "litdata": Parser(_files("index.json", "chunk-0.bin", name="litdata"), [_litdata()]),
    "litdata_tokens": Parser(_files("index.json", "chunk-0.bin", tokens=3, name="litdata"), [_litdata_tokens()]),
    "litdata_leaves": Parser(
        _every_leaf,
        [
            bytes([0]) + struct.pack(">IIII", 17, 2, 1, 2) + bytes(16),
            bytes([1]) + struct.pack("<IIII", 3, 2, 1, 2) + bytes(16),
            bytes([2]) + b"\5\2\0\0\0\1\0\0\0a\2\1\0\0\0" + bytes(8) + b"\1\0\0\0b\1\1\0\0\0\1\0\0\0x",
            bytes([2]) + b"\6\1\0\0\0\1\0\0\0\1\0\0\0k\x12" + bytes(8),
        ],
    ),
    "megatron": Parser(_files("a.idx", "a.bin", name="megatron"), [_megatron()]),
    "megatron_blocks": Parser(_files("a.idx", "a.bin", tokens=3, name="megatron"), [_megatron()]),
    "token_files": Parser(
        _files("a.npy", "b.npy", tokens=5, name="tokens"),
        [_npy() + _MARK + _npy(), _MARK.join([struct.pack("<3i", 20240520, 1, 9) + bytes(1012 + 18)] * 2)],
    ),
    "tfrecord": Parser(_files("a.tfrecord"), [_tfrecord(b"abc") + _tfrecord(_EXAMPLE)]),
    "tfrecord_index": Parser(_files("a.tfindex", "a.tfrecord"), [b"0 19\n19 19\n" + _MARK + _tfrecord(b"abc") * 2]),
    "tf_kind": Parser(lambda data: kind_of(memoryview(data), len(data) + 20), [_EXAMPLE[:12]]),
    "tf_example": Parser(_tf_example, [_EXAMPLE]),
    "tf_sequence_example": Parser(
        lambda data: tfrecord_parser({"holds": "SequenceExample"})(memoryview(_tfrecord(data)), 0),
        [_EXAMPLE, b"\x12\x10\x0a\x0e\x0a\x01s\x12\x09\x0a\x07\x1a\x05\x0a\x03\x01\x02\x03"],
    ),
    "parquet": Parser(
        _files("a.parquet", checksums="all"),
        # When they are asked for: with the first array pyarrow imports pandas.
        lambda: [
            _parquet(compression="none", use_dictionary=False),
            _parquet(),
            _parquet(data_page_version="2.0"),
            _parquet(lists=True),
        ],
    ),
    "parquet_headers": Parser(
        _files("a.parquet"),
        lambda: [_parquet(compression="none"), _parquet(data_page_version="2.0")],
        (GroupDamaged,),  # pages are read by pods first
    ),
    "arrow": Parser(
        _files("a.arrow", checksums="all"),
        lambda: [_arrow(pa.ipc.new_stream), _arrow(pa.ipc.new_file), _arrow(pa.ipc.new_stream, lists=True)],
    ),
    "arrow_headers": Parser(
        _files("a.arrow", checksums="first-read"),
        lambda: [_arrow(pa.ipc.new_stream), _arrow(pa.ipc.new_file)],
        (GroupDamaged,),  # as above
    ),
    "lerobot": Parser(
        _files("meta/info.json", "data/0.parquet", "videos/c/0.mp4", name="lerobot", windows=(4, 2)),
        lambda: [_lerobot()],
    ),
    "table_window": Parser(_window, lambda: [_coded_rows(6), _coded_rows(4)]),
    "mp4": Parser(_moov, lambda: [_mp4(8)], (Mp4Damaged,)),
    "table_row": Parser(
        _row, [b"\7\0" + struct.pack("<iI", 1, 3) + bytes(19) + b"abc", b"\1\0" + struct.pack("<iI", 3, 2) + b"hi"]
    ),
    "webdataset": Parser(
        _files("a.tar"),
        [_tar_member(b"1.jpg", b"abc") + _tar_member(b"1.cls", b"7") + _tar_member(b"d/2.jpg", b"") + bytes(1024)],
    ),
    "webdataset_windows": Parser(
        _files("a.tar", windows=(2, 1)),
        [b"".join(_tar_member(b"e/%d.jpg" % step, b"abc") for step in range(4)) + bytes(1024)],
    ),
    "arrayrecord": Parser(_arrayrecord, [_array_parts([b"a" * 20, b"b"]), _array_parts([_EXAMPLE] * 3)]),
    "arrayrecord_sample": Parser(
        lambda data: arrayrecord_parser({"holds": "bytes"})(memoryview(data), 0),
        [array_chunk([b"abc"]), array_file([b"x" * 70_000])[64:70_160], _array_packed()],
    ),
    "zip": Parser(_files("a.zip"), [_zip(("1.jpg", "1.cls", "d/2.jpg", "README"))]),
    "zip_arrays": Parser(_files("a.npz"), [_zip(("x.npy", "y.npy"))]),
    "json_lines": Parser(_files("a.jsonl"), [b'{"a": 1}\n\n[1]\n"x"']),
    "json_line": Parser(lambda data: jsonl_parser({})(memoryview(data), 0), [b'{"a": 1, "__id__": 2}']),
    # Of checkpoints.
    "state": Parser(
        _of_json(ResumeState.from_dict),
        [_json(**_STATE, position=3, length=9), _json(**_STATE, position=3, length=9, plan=_PLAN, start=1, batch=2)],
    ),
    # Of whoever runs pods.
    "tokens": Parser(_tokens, [b"0123456789abcdef\n"]),
    "settings": Parser(_settings, [b"4GiB\nhttp://p-{ordinal}:8000\nhttp://p-0\ns3://\n1\n0\ninfo"]),
}

_NAMES = (
    *("mds", "megatron", "token_", "tf", "json_line", "litdata", "parquet", "arr", "lerobot", "mp4", "table_"),
    *("webdataset", "zip"),
)
OF_FORMATS = [name for name in PARSERS if name.startswith(_NAMES)]
"""Those of datasets that lie in formats of others."""
