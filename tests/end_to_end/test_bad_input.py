"""What does a user read who got something wrong? One line that names it and says what to do, never a traceback."""

from __future__ import annotations

import errno
import os
import re
import shutil
import socket
import sys
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conftest import S3Server, free_port
from tests.forked_processes import run_refill
from tests.pod_fixtures import rank_of, write_files
from tests.refill_command import refill_says
from tests.running_gate import gate

import refill
from refill.errors import (
    DatasetNotFound,
    DatasetReplaced,
    IndexDamaged,
    IndexVersionUnsupported,
    InvalidInput,
    JobConflict,
    MemoryTooSmall,
    PodUnreachable,
    RefillError,
    SampleDamaged,
    StoreDenied,
    StoreNotFound,
)
from refill_service.cli import main
from refill_service.demo.local_cluster import LocalCluster

Packed = tuple[str, dict[str, bytes]]


@pytest.fixture
def dataset(packed: Packed, tmp_path: Path) -> Path:
    """A copy of the packed dataset, to be spoilt."""
    return Path(shutil.copytree(packed[0].removeprefix("file://"), tmp_path / "dataset"))


def index_of(dataset: Path) -> Path:
    return next(path for path in dataset.rglob("*") if path.is_file() and path.suffix != ".tar")


def with_version(index: bytes, version: int) -> bytes:
    """An index as another version would write it: the version follows the 8 bytes that all begin with."""
    return index[:8] + version.to_bytes(4, "little") + index[12:]


class TestCommands:
    @pytest.mark.parametrize("arguments", [["pack", "photos", "dataset"], ["serve", "--pods", "2"]])
    def test_a_folder_that_was_removed_meanwhile(
        self, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = tmp_path / "folder"
        folder.mkdir()
        monkeypatch.chdir(folder)
        folder.rmdir()
        assert main(arguments) == 2
        assert capsys.readouterr().err == (
            "refill: the folder in which this was started is no more: change to another one\n"
        )

    def test_a_disk_that_is_full(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        def write(text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(sys.stdout, "write", write)
            assert main(["simulate", "--samples", "100", "--chunk-size", "8", "--memory-samples", "50"]) == 2
        assert capsys.readouterr().err == "refill: No space left on device\n"

    @pytest.mark.parametrize(
        ("arguments", "parts"),
        [
            (["serve", "--memory-bytes", "lots"], ["memory_bytes", "REFILL_MEMORY_BYTES", "'lots'", "2GiB"]),
            (["serve", "--port", "70000"], ["port", "65535"]),
            (["serve", "--port", "1234", "--peer-port", "1234"], ["port and peer_port are both 1234"]),
            (["serve", "--ordinal", "3"], ["ordinal is 3 but there are 1 pods"]),
            (["serve", "--log-level", "loud"], ["log_level", "debug, info, warning or error"]),
            (["serve", "--pod-urls", "refill:8000", "--peer-urls", "x"], ["'refill:8000' is not a URL"]),
            (
                ["serve", "--host", "203.0.113.7"],
                ["can't listen on 203.0.113.7", "choose another --host"],
            ),
            (["serve", "--host", "pod.local"], ["host", "'pod.local' is no address", "0.0.0.0 for all"]),
            (["serve", "--peer-timeout-seconds", "1e23"], ["peer_timeout_seconds", "86400"]),
            (["serve", "--memroy", "1GiB"], ["--memroy", "--help"]),
            (["serve", "extra"], ["extra", "--help"]),
            (
                ["pack", "--sed", "3", "/a", "/b"],
                ["unrecognized arguments: --sed (is --seed meant?); see refill pack --help"],
            ),
            (["server"], ["server", "--help"]),
            ([], ["COMMAND", "--help"]),
            (["pack", "/somewhere"], ["DEST", "--help"]),
            (["pack", "/no/such/folder", "file:///tmp/x"], ["/no/such/folder"]),
            (["serve", "--dataset-urls", "/data/my images"], ["write file:///data/my%20images"]),
            (["pakc", "/tmp", "out"], ["there is no command pakc (is pack meant?)"]),
            (["pack", "/tmp", "ftp://x/y"], ["'ftp://x/y' is not a URL of a store; write s3://bucket/prefix"]),
            (["inspect", "s3:///prefix"], ["names no bucket; write s3://bucket/prefix"]),
            (["inspect", "file://host/x"], ["three slashes"]),
            (["inspect", "/no/such/dataset"], ["there is no folder /no/such/dataset"]),
            (["inspect", "file:///no/such/dataset"], ["there is no folder /no/such/dataset"]),
            (["inspect", "shards/wds"], ["there is no folder", "is s3://shards/wds meant?"]),
            (["inspect", "/etc/hostname"], ["/etc/hostname is a file: name the folder of a dataset"]),
            (["inspect", "file:///etc/hostname"], ["/etc/hostname is a file: name the folder of a dataset"]),
            (["top", "http://127.0.0.1:9", "--url", "http://127.0.0.1:8"], ["are two services: name one"]),
            (["jobs", "--url", "http://127.0.0.1:99999"], ["is not the URL of a service", "Port out of range 0-65535"]),
            (["pack", "hf:", "/tmp/out"], ["hf: names no dataset: write hf:NAME"]),
            (["inspect", "/etc"], ["file:///etc: no dataset there", "refill pack"]),
            (
                ["index", "s3://bucket/wds/{000..009}.tar"],
                ["'s3://bucket/wds/{000..009}.tar' names tars; give the folder that holds them: s3://bucket/wds"],
            ),
            (["index", "/data/wds/*.tar"], ["give the folder that holds them: /data/wds"]),
            (["index", "s3://bucket/wds/000.tar"], ["give the folder that holds them: s3://bucket/wds"]),
            (["analyze"], ["name a DATASET or give --samples N, one of them", "--help"]),
            (["analyze", "s3://b/x", "--samples", "9"], ["name a DATASET or give --samples N, one of them"]),
            (["analyze", "/no/such/dataset"], ["there is no folder /no/such/dataset"]),
            (["analyze", "--samples", "some"], ["--samples: 'some' is not a whole number"]),
            (["analyze", "--samples", "9", "--pods", "0"], ["--pods: must be at least 1, got 0"]),
            (["analyze", "--samples", "9", "--chunk-sizes", "4,,8"], ["--chunk-sizes", "'' is not a whole number"]),
            (
                ["analyze", "--samples", "9", "--pod-memory", "lots"],
                ["--pod-memory: 'lots' is not a number of bytes", "2GiB"],
            ),
            (["analyze", "--samples", "9", "--pod-memory", "1"], ["--pod-memory 1 has no room for samples"]),
            (["analyze", "--samples", "9", "--chunk-memory", "120%"], ["--chunk-memory '120%' is not a part", "64GiB"]),
            (["analyze", "--samples", "9", "--memory", "2GiB"], ["--memory (is --pod-memory meant?)"]),
            (
                ["analyze", "--samples", "900", "--chunk-memory", "1kB"],
                ["largest chunk of 64, 6,400,000 bytes", "raise the memory"],
            ),
            (["analyze", "--samples", "900", "--pod-memory", "500kB"], ["raise the memory", "give more --pod-memory"]),
            (
                ["analyze", "--samples", "9", "--redox-chunk-sizes", "16", "--chunk-sizes", "16"],
                ["chunk size 16 is larger than every blob"],
            ),
            (["analyze", "--samples", "9", "--store-latency", "nan"], ["--store-latency: must be at least 0, got nan"]),
            (["analyze", "--samples", "9", "--blob-size", "lots"], ["--blob-size: 'lots' is not a number of bytes"]),
            (["pack", "/tmp", "/tmp/out", "--blob-size", "64 pounds"], ["--blob-size: '64 pounds' is not a number of"]),
            (["end", ""], ["JOB: '' is no name of a job", "refill jobs lists them"]),
            (["receipt", "", "0"], ["JOB: '' is no name of a job"]),
            (["receipt", "run-1", "-1"], ["EPOCH: must be at least 0, got -1"]),
            (["receipt", "run-1", "last"], ["EPOCH: 'last' is not a whole number"]),
            (["warm", "s3://b/x", "--job", "run 1"], ["--job: 'run 1' is no name of a job"]),
            (["warm", "s3://b/x", "--job", "r", "--epoch", "-1"], ["--epoch: must be at least 0, got -1"]),
            (["warm", "s3://b/x", "--job", "r", "--position", "-1"], ["--position: must be at least 0, got -1"]),
            (
                ["warm", "s3://b/x", "--job", "r", "--memory-bytes", "lots"],
                ["--memory-bytes: 'lots' is not a number of"],
            ),
            (["analyze", "--samples", "9", "--part", "0"], ["--part 0 leaves none of the 9 samples of the dataset"]),
            (["analyze", "--samples", "9", "--plot", "x.gif"], ["--plot x.gif", ".png or .svg"]),
            (["analyze", "--samples", "9", "--plot", "/no/such/x.svg"], ["there is no folder /no/such"]),
        ],
        ids=lambda value: " ".join(value)[:60] if value and isinstance(value, list) else "",
    )
    def test_one_line(self, arguments: list[str], parts: list[str]) -> None:
        line = refill_says(*arguments)
        for part in parts:
            assert part in line, line

    def test_a_setting_in_the_environment(self) -> None:
        assert "setting wait_seconds (REFILL_WAIT_SECONDS)" in refill_says(
            "serve", environment={"REFILL_WAIT_SECONDS": "soon"}
        )
        assert "REFILL_STORE_MAX_RETRIES" in refill_says(
            "serve",
            *("--port", str(free_port()), "--peer-port", str(free_port())),
            environment={"REFILL_STORE_MAX_RETRIES": "some"},
        )

    @pytest.mark.parametrize("which", ["--port", "--peer-port"])
    def test_a_port_in_use(self, which: str) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            ports = {"--port": str(free_port()), "--peer-port": str(free_port())} | {which: str(port)}
            line = refill_says("serve", "--host", "127.0.0.1", *(word for pair in ports.items() for word in pair))
        assert f"can't listen on 127.0.0.1:{port}: Address already in use; choose another --port" in line

    def test_an_empty_folder(self, tmp_path: Path) -> None:
        empty = tmp_path / "empty"
        empty.mkdir()
        assert f"{empty} holds no files to pack" in refill_says("pack", str(empty), f"{tmp_path}/out", "--quiet")
        assert ".tar" in refill_says("index", str(empty), "--quiet")

    def test_a_dataset_that_is_there(self, dataset: Path, tmp_path: Path) -> None:
        source = tmp_path / "source"
        source.mkdir()
        write_files(source, 3)
        assert "--force" in refill_says("pack", str(source), str(dataset), "--quiet")

    @pytest.mark.parametrize(
        "spoil", [b"", b"\0", b"garbage" * 1000, os.urandom(5000)], ids=["empty", "0", "text", "random"]
    )
    def test_inspect_garbage(self, dataset: Path, spoil: bytes) -> None:
        index_of(dataset).write_bytes(spoil)
        assert index_of(dataset).name in refill_says("inspect", str(dataset))

    def test_an_index_of_another_version(self, dataset: Path) -> None:
        index = index_of(dataset)
        index.write_bytes(with_version(index.read_bytes(), 99))
        line = refill_says("inspect", str(dataset))
        assert "version 99" in line, line

    def test_a_missing_bucket(self, s3_server: S3Server) -> None:
        line = refill_says("inspect", "s3://no-such-bucket-here/x", environment=s3_server.environment)
        assert "no bucket 'no-such-bucket-here'" in line
        assert line.endswith("; check its name")

    def test_no_permission(self, s3_server: S3Server, tmp_path: Path) -> None:
        bucket = s3_server.new_bucket()
        write_files(tmp_path, 3)
        with gate(s3_server.endpoint_url, "--secret", "other=secret", "--read-only", "test=test-secret") as endpoint:
            environment = s3_server.environment | {"AWS_ENDPOINT_URL": endpoint}
            line = refill_says("pack", str(tmp_path), f"s3://{bucket}/x", "--quiet", environment=environment)
            assert bucket in line
            environment["AWS_SECRET_ACCESS_KEY"] = "wrong"
            line = refill_says("inspect", f"s3://{bucket}/x", environment=environment)
            assert bucket in line

    def test_no_server(self) -> None:
        endpoint = f"http://127.0.0.1:{free_port()}"
        environment = {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ACCESS_KEY_ID": "x",
            "AWS_SECRET_ACCESS_KEY": "y",
            "REFILL_STORE_MAX_RETRIES": "1",
        }
        assert endpoint in refill_says("inspect", "s3://bucket/x", environment=environment)


@pytest.fixture(scope="module")
def pod(s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with (
        gate(s3_server.endpoint_url, "--secret", "other=secret") as endpoint,
        LocalCluster(
            2,
            tmp_path_factory.mktemp("pods"),
            {"memory_bytes": "4MiB"},
            s3_server.environment | {"AWS_ENDPOINT_URL": endpoint},
        ) as denied,
    ):
        yield denied


class TestTraining:
    """Through refill.CacheDataset, as a training script meets it."""

    def says(self, kind: type[RefillError], url: str, dataset: str, **settings: Any) -> str:
        settings = {"job": f"bad-{uuid.uuid4().hex[:8]}", "rank": 0, "timeout_seconds": 1} | settings
        with pytest.raises(RefillError) as caught:
            len(refill.EpochSampler(refill.CacheDataset(url, dataset=dataset, **settings)))
        assert type(caught.value) is kind, repr(caught.value)
        assert "\n" not in str(caught.value)
        assert str(caught.value)
        return str(caught.value)

    @pytest.mark.parametrize(
        "url",
        ["refill:8000", "", "http://", "http://x:port", "http://x:99999", "http://[::1", "ftp://x", "http://x/path"],
    )
    def test_a_wrong_service_url(self, url: str) -> None:
        assert "is not the URL of a service, like http://refill:8000" in self.says(InvalidInput, url, "file:///x")

    @pytest.mark.parametrize("url", [None, 8000, b"http://refill:8000"])
    def test_a_service_url_that_is_no_text(self, url: Any) -> None:
        assert "the URL of a service is text, like http://refill:8000, got" in self.says(InvalidInput, url, "file:///x")

    def test_a_home_that_is_no_pod(
        self, three_pods: LocalCluster, packed: Packed, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Whoever asks pods that plan goes to the service; a live policy keeps what a rank had at its home."""
        url, home = three_pods.pod_urls[0], f"http://127.0.0.1:{free_port()}"
        assert "'pod-1' is not the URL of a service" in self.says(InvalidInput, url, packed[0], home="pod-1")

        def reads(policy: str) -> None:
            job, memory = f"home-{uuid.uuid4().hex[:8]}", "600kB"
            dataset = refill.CacheDataset(
                url, dataset=packed[0], job=job, home=home, policy=policy, memory_bytes=memory, timeout_seconds=3
            )
            refill.EpochSampler(dataset)
            try:
                assert dataset.__getitems__([refill.Position(0, 0)])[0]["__key__"]
            finally:
                dataset.end_job()

        with caplog.at_level("WARNING", "refill"):
            reads("planned")
        assert f"{home} does not answer: rank 0 asks {url}" in caplog.text
        with pytest.raises(PodUnreachable, match=f"rank 0 gives up on {home} after . s"):
            reads("redox")

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            ({"rank": "0"}, "rank '0' is not one of the 1 ranks"),
            ({"job": None}, "job name must be str, got None"),
            ({"timeout_seconds": "3"}, "timeout_seconds must be at least 0, got '3'"),
            ({"timeout_seconds": None}, "timeout_seconds must be at least 0, got None"),
            ({"connect_timeout_seconds": "x"}, "connect_timeout_seconds must be above 0, got 'x'"),
            ({"batch_size": 3}, "CacheDataset has no argument 'batch_size': give it to the DataLoader"),
            ({"memory_bytes": "lots"}, "job setting memory_bytes: 'lots' is not a number of bytes; write for example"),
        ],
        ids=str,
    )
    @pytest.mark.parametrize("policy", ["planned", "redox"])
    def test_a_wrong_argument(self, policy: str, arguments: dict[str, Any], said: str) -> None:
        assert said in self.says(InvalidInput, "http://refill:8000", "file:///x", policy=policy, **arguments)

    @pytest.mark.variants("redox")
    @pytest.mark.parametrize("policy", ["planned", "redox"])
    def test_another_port_of_a_pod(self, three_pods: LocalCluster, packed: Packed, tmp_path: Path, policy: str) -> None:
        """That of other pods speaks HTTP/2, that of metrics has no jobs, and none speaks TLS here."""
        metrics = free_port()
        with LocalCluster(1, tmp_path, {"metrics_port": metrics}) as cluster:
            pods, url = f"http://127.0.0.1:{cluster.peer_ports[0]}", cluster.pod_urls[0]
            for kind, wrong, said in (
                (PodUnreachable, pods, "is that the port of clients, and is its URL https where pods have TLS?"),
                (PodUnreachable, url.replace("http:", "https:"), "it speaks no TLS there: write http://"),
                (InvalidInput, f"http://127.0.0.1:{metrics}", "this is metrics_port, clients have another port"),
            ):
                assert said in self.says(kind, wrong, packed[0], policy=policy)
                assert said in refill_says("jobs", "--url", wrong)

    def test_an_index_that_is_no_number(self, three_pods: LocalCluster, packed: Packed) -> None:
        dataset = refill.CacheDataset(three_pods.pod_urls[0], dataset=packed[0], job=f"bad-{uuid.uuid4().hex[:8]}")
        for wrong in (slice(3), "dog", 1.5):
            with pytest.raises(
                InvalidInput, match=rf"a sample has a number, as dataset\[7\]; got {re.escape(repr(wrong))} in"
            ):
                dataset[wrong]  # type: ignore[index]
        dataset.end_job()

    def test_an_unreachable_pod(self) -> None:
        url = f"http://127.0.0.1:{free_port()}"
        assert f"{url} does not answer" in self.says(PodUnreachable, url, "file:///x")

    def test_something_else_answers(self, s3_server: S3Server) -> None:
        assert s3_server.endpoint_url in self.says(InvalidInput, s3_server.endpoint_url, "file:///x")

    def test_a_wrong_dataset_url(self, three_pods: LocalCluster) -> None:
        url = three_pods.pod_urls[1]
        assert "write s3://bucket/prefix or file:///folder" in self.says(InvalidInput, url, "data/imagenet")
        assert "refill pack" in self.says(DatasetNotFound, url, "file:///no/such/dataset")

    def test_a_missing_bucket_or_permission(self, pod: LocalCluster, s3_server: S3Server, tmp_path: Path) -> None:
        assert "s3://" in self.says(StoreDenied, pod.pod_urls[1], f"s3://{s3_server.new_bucket()}/x")
        with LocalCluster(1, tmp_path, environment=s3_server.environment) as cluster:
            assert "no-such-bucket" in self.says(StoreNotFound, cluster.pod_urls[0], "s3://no-such-bucket/x")

    def test_a_chunk_size_larger_than_a_blob(self, three_pods: LocalCluster, packed: Packed) -> None:
        line = self.says(InvalidInput, three_pods.pod_urls[2], packed[0], chunk_size=1000)
        assert "chunk size 1000 is larger than every blob" in line
        assert "choose chunk_size <=" in line

    def test_memory_too_small_for_one_chunk(self, three_pods: LocalCluster, packed: Packed) -> None:
        job = f"bad-{uuid.uuid4().hex[:8]}"
        url = three_pods.pod_urls[1]
        line = self.says(MemoryTooSmall, url, packed[0], chunk_size=64, memory_bytes=50_000, job=job)
        assert "raise the job's own memory_bytes, which is 50,000, or lower chunk_size" in line
        # What the line says to do works, under the same name.
        better = refill.CacheDataset(url, dataset=packed[0], job=job, chunk_size=2, memory_bytes=50_000, rank=0)
        assert len(better) == 1000
        better.end_job()

    @pytest.mark.parametrize("rank", [0, 1, 2])
    def test_one_name_and_other_settings(self, three_pods: LocalCluster, job: dict[str, Any], rank: int) -> None:
        rank_of(three_pods, job).info()
        settings = {name: job[name] for name in ("chunk_size", "memory_bytes")}
        line = self.says(
            JobConflict, three_pods.pod_urls[rank], job["dataset"], job=job["name"], seed=5, world_size=3, **settings
        )
        assert "(seed: yours is 5, the job's 0)" in line, "as many ranks as you like go on with a job"
        assert "use another name, or end that job first" in line

    def test_two_who_begin_at_once_with_other_settings(self, three_pods: LocalCluster, job: dict[str, Any]) -> None:
        def register(seed: int) -> type | None:
            try:
                rank_of(three_pods, job | {"seed": seed}).info()
            except RefillError as error:
                return type(error)
            return None

        with ThreadPoolExecutor(8) as pool:
            ends = list(pool.map(register, [1, 2] * 4))
        assert ends.count(None) == 4, ends
        assert ends.count(JobConflict) == 4, ends

    def test_a_wrong_rank(self, three_pods: LocalCluster, job: dict[str, Any]) -> None:
        with pytest.raises(InvalidInput, match=r"rank 3 asks, but job .* was registered for world_size 1"):
            rank_of(three_pods, job, rank=3).batch(0, np.arange(3))

    @pytest.mark.parametrize("spoil", ["garbage", "truncated", "version"])
    def test_a_bad_index(self, three_pods: LocalCluster, dataset: Path, spoil: str) -> None:
        index = index_of(dataset)
        data = index.read_bytes()
        index.write_bytes(
            {"garbage": os.urandom(5000), "truncated": data[:-100], "version": with_version(data, 99)}[spoil]
        )
        kind = IndexVersionUnsupported if spoil == "version" else IndexDamaged
        assert index.name in self.says(kind, three_pods.pod_urls[0], dataset.as_uri(), chunk_size=16)

    def test_packed_again_while_a_job_runs(
        self, three_pods: LocalCluster, job: dict[str, Any], dataset: Path, tmp_path: Path
    ) -> None:
        job["dataset"] = dataset.as_uri()
        rank = rank_of(three_pods, job, timeout_seconds=1)
        rank.batch(0, np.arange(50))
        source = tmp_path / "other"
        source.mkdir()
        write_files(source, 900, seed=2)
        arguments = ["pack", str(source), str(dataset), "--force", "--quiet", "--blob-size", "300KB"]
        assert run_refill(arguments).returncode == 0
        errors = []
        for start in range(50, 1000, 50):
            try:
                rank.batch(0, np.arange(start, start + 50))
            except (SampleDamaged, DatasetReplaced) as error:
                errors.append(error)
        assert errors, "bytes of another dataset were delivered"
        assert all(dataset.as_uri() in str(error) for error in errors)
