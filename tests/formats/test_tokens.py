"""Files of tokens: samples by arithmetic, the same tokens as those who wrote them read, and next to nothing read."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from refill_service.cli import main
from refill_service.demo.local_cluster import LocalCluster
from tests.conftest import S3Server
from tests.formats import peers
from tests.formats.reading import asked_of, bytes_at, epoch_of, opened, put

MEGATRON_CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}


def tokens_of(count: int, dtype: str = "uint16", seed: int = 1) -> Any:
    return np.random.default_rng(seed).integers(0, 50_000, count).astype(dtype)


def write_llm_c(path: Path, tokens: Any) -> None:
    """As karpathy/llm.c, dev/data/data_common.py."""
    header = np.zeros(256, dtype=np.int32)
    header[:3] = (20240801, 7, len(tokens)) if tokens.dtype == np.uint32 else (20240520, 1, len(tokens))
    path.write_bytes(header.tobytes() + tokens.tobytes())


def write_megatron(folder: Path, name: str, sequences: list[Any], documents: list[int], *, modes: bool = False) -> None:
    """As megatron/core/datasets/indexed_dataset.py."""
    dtype = sequences[0].dtype
    lengths = np.array([len(each) for each in sequences], dtype=np.int32)
    pointers = np.concatenate([[0], np.cumsum(lengths[:-1].astype(np.int64) * dtype.itemsize)]).astype(np.int64)
    head = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", MEGATRON_CODES[dtype.name])
    head += struct.pack("<Q", len(lengths)) + struct.pack("<Q", len(documents))
    rest = lengths.tobytes() + pointers.tobytes() + np.array(documents, dtype=np.int64).tobytes()
    (folder / f"{name}.idx").write_bytes(head + rest + bytes(len(lengths)) * modes)
    (folder / f"{name}.bin").write_bytes(b"".join(each.tobytes() for each in sequences))


def blocks(tokens: Any, length: int, stride: int) -> list[Any]:
    return [tokens[start : start + length] for start in range(0, len(tokens) - length + 1, stride)]


def num_used(count: int, length: int, stride: int) -> int:
    """Of so many tokens, those that are in blocks."""
    return len({place for block in blocks(np.arange(count), length, stride) for place in block.tolist()})


def same(found: list[Any], wanted: list[Any]) -> None:
    assert len(found) == len(wanted)
    for sample, tokens in zip(found, wanted, strict=True):
        assert sample["tokens"].dtype == tokens.dtype
        assert np.array_equal(sample["tokens"], tokens)


class TestKinds:
    @pytest.mark.parametrize(("length", "stride"), [(65, 64), (64, 64), (64, 32), (50, 70)])
    @pytest.mark.parametrize("dtype", ["uint16", "int32"])
    def test_without_a_header(
        self, tmp_path: Path, pod: LocalCluster, capsys: Any, length: int, stride: int, dtype: str
    ) -> None:
        files = [tokens_of(3000, dtype, 1), tokens_of(1111, dtype, 2)]
        for number, tokens in enumerate(files):
            tokens.tofile(tmp_path / f"train_{number}.bin")
        command = ["index", str(tmp_path), "--tokens", str(length), "--stride", str(stride), "--dtype", dtype]
        assert main(command) == 0
        said = capsys.readouterr()
        assert f"format tokens: 2 files (no header) of {dtype}, {length} a sample, one each {stride}" in said.err
        assert "read are headers alone (--checksums first-read)" in said.err
        wanted = [each for tokens in files for each in blocks(tokens, length, stride)]
        left_over = sum(map(len, files)) - sum(num_used(len(tokens), length, stride) for tokens in files)
        assert f"; {left_over} tokens are of no sample" in said.out
        assert bytes_at(tmp_path) == [each.tobytes() for each in wanted]
        same(epoch_of(pod, tmp_path.as_uri()), wanted)

    @pytest.mark.parametrize("dtype", ["uint16", "uint32"])
    def test_llm_c(self, tmp_path: Path, pod: LocalCluster, dtype: str) -> None:
        files = [tokens_of(2000 + 100 * each, dtype, each) for each in range(3)]
        for number, tokens in enumerate(files):
            write_llm_c(tmp_path / f"fineweb_train_{number:06d}.bin", tokens)
        assert main(["index", str(tmp_path), "--tokens", "129", "--stride", "128", "--quiet"]) == 0
        wanted = [each for tokens in files for each in blocks(tokens, 129, 128)]
        same(epoch_of(pod, tmp_path.as_uri()), wanted)

    def test_numpy(self, tmp_path: Path, pod: LocalCluster) -> None:
        tokens = tokens_of(5000, "int64")
        np.save(tmp_path / "a.npy", tokens)
        assert main(["index", str(tmp_path), "--tokens", "100", "--checksums", "all", "--quiet"]) == 0
        assert opened(tmp_path.as_uri())[0].header.has_checksums
        same(epoch_of(pod, tmp_path.as_uri()), blocks(tokens, 100, 100))

    def test_rows_of_numpy(self, tmp_path: Path, pod: LocalCluster) -> None:
        rows = tokens_of(120, "uint32").reshape(40, 3)
        np.save(tmp_path / "a.npy", rows[:25])
        np.save(tmp_path / "b.npy", rows[25:])
        assert main(["index", str(tmp_path), "--format", "tokens", "--quiet"]) == 0
        same(epoch_of(pod, tmp_path.as_uri()), list(rows))

    @pytest.mark.parametrize("modes", [False, True])
    def test_megatron(self, tmp_path: Path, pod: LocalCluster, modes: bool, capsys: Any) -> None:
        parts = [[tokens_of(n, "int32", n) for n in (5, 0, 300, 41)], [tokens_of(n, "int32", n) for n in (200, 7)]]
        for number, sequences in enumerate(parts):
            write_megatron(tmp_path, f"part_{number}", sequences, [0, 2, len(sequences)], modes=modes)
        assert main(["index", str(tmp_path)]) == 0
        assert "format megatron: 2 pairs of .bin and .idx" in capsys.readouterr().err
        same(epoch_of(pod, tmp_path.as_uri(), chunk_size=2), [each for sequences in parts for each in sequences])
        assert main(["index", str(tmp_path), "--tokens", "33", "--stride", "32", "--force", "--quiet"]) == 0
        flat = [np.concatenate(sequences) for sequences in parts]
        same(epoch_of(pod, tmp_path.as_uri()), [each for tokens in flat for each in blocks(tokens, 33, 32)])

    @pytest.mark.parametrize("dtype", ["uint16", "int32"])
    def test_megatron_as_its_own_writer_and_reader_have_it(self, tmp_path: Path, pod: LocalCluster, dtype: str) -> None:
        theirs = peers.megatron()
        prefix = str(tmp_path / "corpus")
        builder = theirs.IndexedDatasetBuilder(f"{prefix}.bin", dtype=getattr(np, dtype))
        for number in range(6):
            sequences = [tokens_of(50 * number + n + 1, dtype, number).astype(np.int64) for n in range(3)]
            builder.add_document(torch.from_numpy(np.concatenate(sequences)), [len(each) for each in sequences])
        builder.finalize(f"{prefix}.idx")
        read = theirs.IndexedDataset(prefix)
        assert main(["index", str(tmp_path), "--quiet"]) == 0
        same(epoch_of(pod, tmp_path.as_uri()), [np.array(read[place]) for place in range(len(read))])
        assert len(read) == 18


class TestRefusals:
    @pytest.mark.parametrize(
        ("content", "more", "says"),
        [
            (b"x" * 4000, ["--tokens", "8"], "give --dtype"),
            (b"x" * 4001, ["--tokens", "8", "--dtype", "uint16"], "are not a whole number of uint16"),
            (b"x" * 4000, ["--tokens", "8", "--dtype", "str"], "--dtype must be one of"),
            (b"x" * 4000, ["--dtype", "uint16"], "--tokens N says how many"),
            (b"x" * 4000, ["--tokens", "8", "--stride", "3", "--dtype", "uint16"], "Give --stride 4 or more"),
            (b"x" * 4000, ["--tokens", "0", "--dtype", "uint16"], "--tokens: must be at least 1"),
            (struct.pack("<iii", 20240520, 1, 5) + bytes(1012) + b"x" * 8, ["--tokens", "2"], "says 5 tokens"),
            (struct.pack("<iii", 20240520, 1, -5), ["--tokens", "2"], "ends within its header"),
            (b"\x93NUMPY\1\0\xff\xff{", ["--tokens", "2"], "header of numpy can't be read"),
            (b"\x93NUMPY\1\0\x76\0" + b"{'descr': '|O', 'fortran_order': False, 'shape': (3,)}".ljust(118),
             ["--tokens", "2"], "tokens are numbers"),
            (b"\x93NUMPY\1\0\x76\0" + b"{'descr': '<u2', 'fortran_order': False, 'shape': (3,)}".ljust(118),
             ["--tokens", "2"], "says 3 numbers of uint16"),
            (b"\x93NUMPY\1\0\x76\0" + b"{'descr': '<u2', 'fortran_order': False, 'shape': (3,)}".ljust(118) + bytes(6),
             ["--tokens", "2", "--dtype", "uint16"], "would come as tokens: leave --dtype uint16 out"),
        ],
    )  # fmt: skip
    def test_what_it_can_not_be(self, tmp_path: Path, capsys: Any, content: bytes, more: list[str], says: str) -> None:
        (tmp_path / "a.bin").write_bytes(content)
        assert main(["index", str(tmp_path), *more]) == 2
        assert says in capsys.readouterr().err
        assert not (tmp_path / "refill.index").exists()

    @pytest.mark.parametrize("header", [struct.pack("<iii", 20240520, 1, 500) + bytes(1012), b"\x93NUMPY\1\0\x76\0"])
    def test_a_header_among_files_without_is_no_tokens(self, tmp_path: Path, capsys: Any, header: bytes) -> None:
        (tmp_path / "a.bin").write_bytes(bytes(100))
        (tmp_path / "b.bin").write_bytes(header + bytes(1000))
        assert main(["index", str(tmp_path), "--tokens", "8", "--dtype", "uint16"]) == 2
        assert "it has a header, and the first file has none" in (said := capsys.readouterr().err)
        assert "b.bin" in said

    def test_half_of_a_pair_of_megatron_is_named(self, tmp_path: Path, capsys: Any) -> None:
        write_megatron(tmp_path, "a", [tokens_of(9, "int32")], [0, 1])
        (tmp_path / "b.bin").write_bytes(bytes(8))
        (tmp_path / "c.idx").write_bytes(bytes(8))
        assert main(["index", str(tmp_path)]) == 0
        assert "; 2 .bin and .idx without the other are left out, such as b.bin" in capsys.readouterr().err

    def test_a_file_of_another_type_is_named(self, tmp_path: Path, capsys: Any) -> None:
        np.save(tmp_path / "a.npy", tokens_of(100, "uint16"))
        np.save(tmp_path / "b.npy", tokens_of(100, "uint32"))
        assert main(["index", str(tmp_path), "--tokens", "8"]) == 2
        assert "b.npy: can't be read from byte 0" in (said := capsys.readouterr().err)
        assert "numpy of uint32, and the first file is numpy of uint16" in said

    @pytest.mark.parametrize(
        ("at", "value", "says"),
        [
            (9, b"\2", "version 2"),
            (17, b"\x63", "type of numbers, 99"),
            (18, b"\xff\xff\xff\xff\xff\xff\xff\x0f", "sequences"),
            (34, b"\xff\xff\xff\xff", "sequence 0 can't lie"),
            (34 + 4 * 3 + 8, b"\xff\xff\xff\xff", "sequence 1 can't lie"),
        ],
    )
    def test_a_damaged_index_of_megatron(self, tmp_path: Path, capsys: Any, at: int, value: bytes, says: str) -> None:
        write_megatron(tmp_path, "a", [tokens_of(9, "int32", each) for each in range(3)], [0, 3])
        data = bytearray((tmp_path / "a.idx").read_bytes())
        data[at : at + len(value)] = value
        (tmp_path / "a.idx").write_bytes(data)
        assert main(["index", str(tmp_path)]) == 2
        assert "a.idx" in (said := capsys.readouterr().err)
        assert says in said


def test_megatron_takes_two_requests_a_pair(
    tmp_path: Path, s3_environment: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        write_megatron(tmp_path, name, [tokens_of(20_000, "int32", each) for each in range(10)], [0, 10])
    url = put(s3_environment, tmp_path)
    with asked_of(s3_environment) as asked:
        monkeypatch.setenv("AWS_ENDPOINT_URL", asked.url)
        assert main(["index", url, "--tokens", "129", "--stride", "128", "--quiet"]) == 0
    for name in ("a", "b"):
        assert asked.of(f"{name}.bin") == (0, 0)
        requests, num_bytes = asked.of(f"{name}.idx")
        assert requests <= 2
        assert num_bytes <= (tmp_path / f"{name}.bin").stat().st_size / 1000
