"""`refill.testing`: users test their training code on real pods, some of which go. The example of the docs is run."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.end_to_end.doc_pages import ROOT, blocks
from tests.end_to_end.test_base_install import WITHOUT
from tests.pod_fixtures import write_files
from tests.waiting import until
from torch.utils.data import DataLoader

import refill
from refill import testing
from refill.errors import InvalidInput, UnknownJob

NUM_SAMPLES = 200
SETTINGS = {"chunk_size": 4, "memory_bytes": 400_000, "num_epochs": 1}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("testing")
    (folder / "files").mkdir()
    write_files(folder / "files", NUM_SAMPLES)
    return testing.packed(folder / "files", folder / "dataset")


@pytest.fixture(scope="module")
def pods() -> Iterator[testing.Pods]:
    with testing.Pods(3, memory_bytes="4MiB", wait_seconds=1) as pods:
        yield pods


def batches_of(url: str, dataset: str, job: str) -> Iterator[list[Any]]:
    """As training code has them."""
    of_job = refill.CacheDataset(url, dataset=dataset, job=job, **SETTINGS)  # type: ignore[arg-type]
    yield from DataLoader(of_job, 10, sampler=refill.EpochSampler(of_job), collate_fn=list)


def has_begun(pods: testing.Pods, job: str) -> bool:
    with contextlib.suppress(UnknownJob):
        return bool(pods.receipt(job, 0))
    return False


def test_the_example_of_the_docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (example,) = (text for text in blocks(ROOT / "docs" / "CLIENT.md", "python") if "testing.Pods" in text)
    monkeypatch.chdir(tmp_path)
    Path("images").mkdir()
    write_files(Path("images"), NUM_SAMPLES)
    names: dict[str, Any] = {"loader_of": batches_of}
    exec(compile(example, "the docs", "exec"), names)
    (test,) = (each for name, each in names.items() if name.startswith("test_"))
    test(tmp_path)


def test_pods_go_and_come_and_stand_still_and_every_sample_comes_once(pods: testing.Pods, dataset: str) -> None:
    seen: Counter[int] = Counter()
    for number, batch in enumerate(batches_of(pods.url, dataset, "comes-and-goes")):
        seen.update(sample["__id__"] for sample in batch)
        if number == 3:
            pods.kill(1)
        if number == 6:
            pods.restart(1)
        if number == 9:
            pods.pause(2)
        if number == 12:
            pods.resume(2)
    assert seen == Counter(range(NUM_SAMPLES))
    pods.check_exact("comes-and-goes", 0)
    assert "clients on 127.0.0.1" in pods.log(1)


def test_what_is_not_exact_fails_with_what_is_missing(pods: testing.Pods, dataset: str) -> None:
    batches = batches_of(pods.url, dataset, "left")
    next(batches)
    until(lambda: has_begun(pods, "left"), "a receipt")  # a busy pod may leave the batch to another one
    with pytest.raises(
        AssertionError,
        match=r"epoch 0 of job left is not exact: \{'planned': 200, 'received': \d+, 'unconfirmed': 2?\d+",
    ):
        pods.check_exact("left", 0, timeout_seconds=0)
    with pytest.raises(UnknownJob):
        pods.receipt("another", 0)
    for pods_may_forget in (False, True):
        if pods_may_forget:
            pods.kill(1)
            pods.restart(1)
        with pytest.raises(UnknownJob):
            pods.check_exact("another", 0, timeout_seconds=0)


def test_an_epoch_that_has_not_begun_is_said_at_once(dataset: str) -> None:
    with testing.Pods(2) as pods:
        list(batches_of(pods.url, dataset, "one-epoch"))
        pods.check_exact("one-epoch", 0)
        with pytest.raises(UnknownJob, match="epoch 1 of job one-epoch has not begun, or is long over"):
            pods.check_exact("one-epoch", 1, timeout_seconds=float("inf"))
        with pytest.raises(UnknownJob, match="no pod knows job another"):
            pods.check_exact("another", 0, timeout_seconds=float("inf"))
        with pytest.raises(InvalidInput, match="epoch"):
            pods.check_exact("one-epoch", -1)


def test_what_is_wrong_is_said_before_anything_is_started() -> None:
    for num_pods in (0, 17):
        with pytest.raises(InvalidInput, match=f"num_pods must be 1 to 16, got {num_pods}"):
            testing.Pods(num_pods)
    with pytest.raises(InvalidInput, match="memory_bytes"):
        testing.Pods(1, memory_bytes="many")
    with pytest.raises(InvalidInput, match="memory_byte "):
        testing.Pods(1, memory_byte="4MiB")


def test_without_the_service_it_says_what_to_install() -> None:
    without = WITHOUT.partition("from refill_service.cli")[0] + "import refill.testing"
    ran = subprocess.run([sys.executable, "-c", without], capture_output=True, text=True, timeout=120)
    assert ran.stderr.splitlines()[-1].endswith(
        "is not installed; refill.testing needs: pip install 'refill-cache[service]'"
    )


def test_pods_end_with_a_test_run_that_is_interrupted(tmp_path: Path) -> None:
    script = """
import signal, threading
from refill import testing
signal.signal(signal.SIGINT, signal.default_int_handler)
with testing.Pods() as pods:
    print(pods.url, flush=True)
    while not threading.Event().wait(0.1):  # signal.pause() would wait for ever for one that came just before it
        pass
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert process.stdout is not None
    url = process.stdout.readline().strip()
    assert url.startswith("http://127.0.0.1:")
    process.send_signal(signal.SIGINT)
    process.wait(60)
    process.stdout.close()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(refill.RefillError):
        refill.CacheDataset(url, dataset="file:///nowhere", job="none", timeout_seconds=0).connection.info()


def test_a_pod_that_is_not_there_is_named(pods: testing.Pods) -> None:
    for ask in (pods.kill, pods.restart, pods.pause, pods.resume, pods.log, lambda pod: pods.receipt("job", 0, pod)):
        for pod in (9, -1):
            with pytest.raises(InvalidInput, match=f"there is no pod {pod}; there are pods 0 to 2"):
                ask(pod)
