"""A stranger's first hour: README typed line by line in a fresh folder, with photos of several sizes; runs, a notebook,
a refused run. In ``make test-all`` three runs one after another, and a validation split; and each command is a process
of the fresh environment, where ``make test`` has that for the first ones of every kind: the others are forked.

The environment is a fresh one, with the wheel that `make dist` builds; what it needs comes from the one that runs the
tests. Each line of README's blocks is typed here as it stands, with other places and lengths, or is in ``ELSEWHERE``.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image
from tests.conftest import S3Server, free_port
from tests.end_to_end.doc_pages import ROOT, blocks
from tests.end_to_end.test_distribution import PROJECT, UV, run
from tests.end_to_end.test_local_pods import ports
from tests.forked_processes import PODS, RANKS, python_of
from tests.waiting import until

README = ROOT / "README.md"
NUM_PHOTOS = 96
SIZES = ((64, 48), (48, 64), (80, 80), (33, 57))
SECONDS = 240

ELSEWHERE = {
    "make demo": "test_demo.py",
    ". .venv/bin/activate": "the environment is a fresh one, below",
    "make dist": "test_distribution.py",
    "pip install ": "test_distribution.py",
    "docker build ": "tests/docker",
    "helm ": "tests/helm, tests/cluster",
    "REFILL_REPLICAS=3 ": "hosts that are called refill-0 and so on; tests/service/test_settings.py",
}
"""What lines begin with that need more than a folder, and who tries them."""

NOTEBOOK = """
import json, sys, __main__
for number, cell in enumerate(json.load(sys.stdin)):
    exec(compile(cell, f"<cell {number}>", "exec"), __main__.__dict__)
"""


class Stranger:
    """A shell in a folder of its own.

    :param scripts: the folder of the environment's commands.
    """

    def __init__(self, folder: Path, scripts: Path, s3: S3Server) -> None:
        self.folder = folder
        self.bucket, self.s3 = s3.new_bucket(), s3.client()
        self.places = {"s3://bucket": f"s3://{self.bucket}"}
        """What README names -> what it is here."""
        kept = {name: os.environ[name] for name in ("LANG", "TMPDIR") if name in os.environ}
        self.environment = kept | s3.environment | {"PATH": f"{scripts}:/usr/bin:/bin", "HOME": str(folder)}

    def goes_on_in_short(self) -> None:
        """From now on ``refill`` and ``python`` are forked from processes that have imported the tree's refill."""
        quick = self.folder / "quick"
        quick.mkdir()
        for name, command in (
            ("refill", [*python_of(PODS), "-m", "refill_service.cli"]),
            ("python", python_of(RANKS)),
        ):
            (quick / name).write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
            (quick / name).chmod(0o755)
        self.environment["PATH"] = f"{quick}:{self.environment['PATH']}"

    def types(self, line: str, status: int = 0, given: str = "") -> subprocess.CompletedProcess[str]:
        """A line, which ends."""
        done = subprocess.run(
            ["bash", "-c", self.here(line)],
            cwd=self.folder,
            env=self.environment,
            input=given,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        assert done.returncode == status, f"{line}\n{done.stdout}{done.stderr}"
        return done

    @contextlib.contextmanager
    def serves(self, line: str, *options: str) -> Iterator[None]:
        """A line that goes on until it is stopped."""
        log = self.folder / "serve.log"
        with log.open("w") as output:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {self.here(line)} {' '.join(options)}"],
                cwd=self.folder,
                env=self.environment,
                stdout=output,
                stderr=output,
            )
        try:
            self.places["http://refill:8000"] = url = f"http://127.0.0.1:{options[1]}"

            def is_ready() -> bool:
                assert process.poll() is None, log.read_text()
                return _is_ready(url)

            until(is_ready, "the pods")
            yield
        finally:
            process.terminate()
            process.wait(SECONDS)

    def here(self, text: str) -> str:
        for shown, place in self.places.items():
            text = text.replace(shown, place)
        return text

    def train_script(self, dataset: str, **others: str) -> str:
        """README's lines, a shorter training with fewer workers, and others in place of some of them."""
        (text,) = blocks(README, "python")
        for shown, short in (
            ("range(90)", "range(2)"),
            ("batch_size=256", "batch_size=16"),
            ("num_workers=4", "num_workers=1"),
            ("s3://bucket/images", dataset),
        ):
            assert shown in text
            text = text.replace(shown, short)
        for shown, other in others.items():
            assert f'{shown}="' in text
            text = re.sub(rf'{shown}="[^"]*"', other, text)
        return self.here(text)


def _is_ready(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/readyz", timeout=5).status_code == 200
    return False


def lines_of_the_readme() -> Iterator[str]:
    """Each that is to be typed, continued ones as one, without its comment."""
    for block in blocks(README, ""):
        for line in block.replace("\\\n", " ").splitlines():
            typed = re.sub(r"\s+#.*", "", line).strip()
            if typed and not typed.startswith(tuple(ELSEWHERE)):
                yield typed


@pytest.fixture
def stranger(tmp_path: Path, s3_server: S3Server) -> Stranger:
    environment, dist, folder = tmp_path / "environment", tmp_path / "dist", tmp_path / "folder"
    build = ("--wheel", "--build-constraints", "docker/build.lock", "--require-hashes")
    run(UV, "build", "--quiet", *build, "--out-dir", dist, ".")
    run(UV, "venv", "--quiet", "--python", sys.executable, "--no-project", environment)
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "behind.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    wheel = dist / f"refill_cache-{PROJECT['version']}-py3-none-any.whl"
    run(UV, "pip", "install", "--quiet", "--no-deps", "--python", environment, wheel)
    draws = np.random.default_rng(0)
    for number in range(NUM_PHOTOS):
        of_class = folder / "images" / ("dog" if number % 2 else "cat")
        of_class.mkdir(parents=True, exist_ok=True)
        pixels = draws.integers(0, 255, (*SIZES[number % len(SIZES)], 3), dtype=np.uint8)
        Image.fromarray(pixels).save(of_class / f"{number:04}.jpg")
    return Stranger(folder, environment / "bin", s3_server)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "in_full", [pytest.param(True, id="in full", marks=pytest.mark.variant), pytest.param(False, id="in short")]
)
def test_a_strangers_hour(stranger: Stranger, in_full: bool) -> None:
    lines = lines_of_the_readme()
    assert stranger.types("python -c 'import refill; print(refill.__file__)'").stdout.startswith(
        str(stranger.folder.parent / "environment")
    )
    on_one_machine(stranger, lines, in_full)
    with_a_bucket(stranger, lines)
    assert list(lines) == [], "README has lines that nobody types"


def on_one_machine(stranger: Stranger, lines: Iterator[str], in_full: bool) -> None:
    packed = stranger.types(typed(lines, "refill pack ./images ./dataset")).stdout
    assert packed.startswith(f"packed {NUM_PHOTOS} samples of 2 classes ({NUM_PHOTOS} files) into 1 blob")
    dataset = (stranger.folder / "dataset").as_uri()
    with stranger.serves(typed(lines, "refill serve --pods 3"), *ports()):
        train = typed(lines, "python train.py")
        for number in (1, 2, 3) if in_full else (3,):
            script = stranger.train_script(dataset, job=f'job="run-{number}"')
            (stranger.folder / "train.py").write_text(script)
            assert "Traceback" not in stranger.types(train).stderr
            receipt = stranger.types(f"refill receipt run-{number} 1 --url http://refill:8000").stdout
            assert "): exact\n" in receipt, receipt
        if not in_full:
            stranger.goes_on_in_short()
        a_notebook(stranger, dataset)
        a_refused_run(stranger, dataset)
        if in_full:
            stranger.types("python other.py")  # the job that was in its way has ended
            a_validation_split(stranger, dataset)


def a_notebook(stranger: Stranger, dataset: str) -> None:
    """Its cells are README's paragraphs, in a process whose functions are of no file. The last one is run twice."""
    script = stranger.train_script(dataset, job='job="notebook"')
    cells = re.split(r"\n\n+(?=\S)", script.replace("...", "print(epoch, len(labels))"))
    done = stranger.types(f"python -c '{NOTEBOOK}'", given=json.dumps([*cells, cells[-1]]))
    batches = NUM_PHOTOS // 16
    assert done.stdout.splitlines() == (["0 16"] * batches + ["1 16"] * batches) * 2


def a_refused_run(stranger: Stranger, dataset: str) -> None:
    """A name that is in use with other settings: what the last line says is to be done."""
    other = stranger.train_script(dataset, job='job="run-3", seed=7')
    (stranger.folder / "other.py").write_text(other)
    said = stranger.types("python other.py", status=1).stderr.splitlines()[-1]
    assert said == (
        "refill.errors.JobConflict: job run-3 was registered before with other settings (seed: yours is 7, the job's "
        "0): use another name, or end that job first"
    )
    stranger.types("refill end run-3 --url http://refill:8000")


def a_validation_split(stranger: Stranger, dataset: str) -> None:
    """As docs/QUESTIONS.md has it. (The fresh environment has no command torchrun, only its module.)"""
    torchrun, script = "python -m torch.distributed.run", ROOT / "examples" / "train_validation_split.py"
    said = stranger.types(f"{torchrun} --nproc-per-node=2 {script} http://refill:8000 {dataset} split").stdout
    held_out = NUM_PHOTOS // 10
    for part, count in (("training", NUM_PHOTOS - held_out), ("validation", held_out)):
        for epoch in range(2):
            assert f"{part}, epoch {epoch}: {count} samples, each once" in said


def with_a_bucket(stranger: Stranger, lines: Iterator[str]) -> None:
    stranger.types(typed(lines, "refill pack ./images s3://bucket/images"))
    copy_shards(stranger, "images", "my-shards")
    indexed = stranger.types(typed(lines, "refill index s3://bucket/my-shards")).stdout
    assert indexed.startswith(f"indexed {NUM_PHOTOS} samples in 1 tars")
    inspected = stranger.types(typed(lines, "refill inspect s3://bucket/images --verify")).stdout
    assert inspected.endswith(f"all {NUM_PHOTOS} samples are as they were packed\n")
    options = ("--port", str(free_port()), "--peer-port", str(free_port()))
    with stranger.serves(typed(lines, "refill serve --memory-bytes 4GiB"), *options):
        (stranger.folder / "train.py").write_text(stranger.train_script("s3://bucket/images"))
        stranger.types("python train.py")
        receipt = stranger.types(typed(lines, "refill receipt run-1 0 --url http://refill:8000")).stdout
        assert "): exact\n" in receipt, receipt
        jobs = stranger.types(typed(lines, "refill jobs --url http://refill:8000")).stdout
        assert jobs.splitlines()[1].split()[0] == "run-1"
        ended = stranger.types(typed(lines, "refill end run-1 --url http://refill:8000")).stdout
        assert ended == "job run-1 was ended\n"
        assert "1 pod, 0 jobs" in stranger.types(typed(lines, "refill top http://refill:8000")).stdout
    for line in lines:
        assert line.startswith(("refill analyze ", "refill simulate ")), f"README has a line that nobody types: {line}"
        assert stranger.types(re.sub(r"--samples (\d+)0\b", r"--samples \1", line)).stdout, (
            "a tenth of what is simulated"
        )
    assert (stranger.folder / "frontier.svg").exists()


def copy_shards(stranger: Stranger, packed: str, shards: str) -> None:
    """The shards that README takes for granted: tars without an index."""
    for found in stranger.s3.list_objects_v2(Bucket=stranger.bucket, Prefix=packed)["Contents"]:
        if found["Key"].endswith(".tar"):
            name, source = found["Key"].replace(packed, shards, 1), {"Bucket": stranger.bucket, "Key": found["Key"]}
            stranger.s3.copy_object(Bucket=stranger.bucket, Key=name, CopySource=source)


def typed(lines: Iterator[str], expected: str) -> str:
    """README's next line, which is to be this one."""
    line = next(lines, None)
    assert line == expected, "README has another line here: type it in this test, too"
    return line
