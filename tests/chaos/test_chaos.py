"""Seconds of what `make chaos` does for minutes, and that its instruments see what they are to see."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path

import httpx
import numpy as np
import pytest
from tests.chaos.chaos_dataset import ChaosDataset, ChaosMixture, dataset_in_s3, mixture_in_s3
from tests.chaos.chaos_run import ChaosRun, repeated_by
from tests.chaos.draw import schedule_of, setting_of
from tests.chaos.ground_truth import GroundTruth
from tests.chaos.kinds import ALL, NAMED_THEMES, THEMES
from tests.chaos.memory_trend import trend_of
from tests.chaos.rank import Answer
from tests.chaos.tcp_relay import Relay
from tests.chaos.verdict import Verdict
from tests.conftest import S3Server

FAULT_SECONDS = 2.0


@pytest.fixture(scope="module")
def dataset(s3_server: S3Server) -> ChaosDataset:
    return dataset_in_s3(s3_server.environment, num_samples=480)


@pytest.mark.variants("redox")
@pytest.mark.parametrize(
    ("seed", "policy", "themes"),
    [
        (1, "planned", ("plans", "resumes")),
        (2, "redox", ("lost",)),
        pytest.param(1, "planned", ("mixture", "resumes"), marks=pytest.mark.variant),
        pytest.param(20, "planned", ("sweep",), marks=pytest.mark.variant),
        pytest.param(8, "planned", ("mixture", "scaling"), marks=pytest.mark.variant),
        pytest.param(3, "planned", ("ends", "twins"), marks=pytest.mark.variant),
        pytest.param(4, "planned", ("memory", "scaling"), marks=pytest.mark.variant),
        pytest.param(5, "planned", ("observers", "partitions"), marks=pytest.mark.variant),
        pytest.param(6, "exact", ("apart", "twins"), marks=pytest.mark.variant),
    ],
)
def test_epochs_are_exact_through_a_schedule_of_faults(
    dataset: ChaosDataset, s3_server: S3Server, seed: int, policy: str, themes: tuple[str, ...]
) -> None:
    of_run: ChaosDataset | ChaosMixture = dataset
    if "mixture" in themes:
        of_run = ChaosMixture.of_seed(mixture_in_s3(s3_server.environment), seed)
    run = ChaosRun(setting_of(seed, policy, themes), of_run, FAULT_SECONDS)
    outcome = run.run()
    assert not outcome.problems, outcome.report(run.schedule, repeated_by(run.setting, FAULT_SECONDS))
    assert outcome.verdict.receipts, "no receipt was looked at"
    assert outcome.verdict.times_lost == outcome.faults["lose job"]
    assert ("lost" in themes) == bool(outcome.verdict.times_lost), "the theme came to nothing"
    assert ("sweep" in themes) == bool(outcome.shared_bytes), "jobs read for themselves"


def test_a_schedule_follows_from_its_seed() -> None:
    settings = [setting_of(seed) for seed in range(100)]
    assert [schedule_of(setting, 5) for setting in settings] == [schedule_of(setting_of(s), 5) for s in range(100)]
    assert {theme for setting in settings for theme in setting.themes} == {*THEMES} - {*NAMED_THEMES}
    settings += [setting_of(seed, "planned", NAMED_THEMES) for seed in range(20)]
    assert {fault.kind for setting in settings for fault in schedule_of(setting, 20)} == {*ALL}


CHECKSUMS = [100, 101, 102, 103]


def truth(tmp_path: Path, *answers: tuple[int, Answer]) -> list[str]:
    """The problems of two ranks with two positions each, in one epoch."""
    files = [tmp_path / "rank-0", tmp_path / "rank-1"]
    for rank, answer in answers:
        with files[rank].open("a") as file:
            file.write(json.dumps(answer) + "\n")
    return GroundTruth(files, CHECKSUMS).check(epochs=1)


WHOLE = Answer(0, [0, 1], [3, 0], [103, 100])
OTHER = Answer(0, [0, 1], [1, 2], [101, 102])


class TestGroundTruth:
    def test_nothing_to_say(self, tmp_path: Path) -> None:
        assert truth(tmp_path, (0, WHOLE), (1, OTHER), (0, WHOLE)) == []

    @pytest.mark.parametrize(
        ("answer", "problem"),
        [
            (Answer(0, [0, 1], [1, 3], [101, 103]), "1 samples that came more than once: 3"),
            (Answer(0, [0], [1], [101]), "1 samples that never came: 2"),
            (Answer(0, [0], [1], [101]), "1 positions without an answer"),
            (Answer(0, [0, 1], [1, 2], [101, 1]), "the bytes of sample 2 are wrong"),
            (Answer(0, [0, 1], [1, 4], [101, 1]), "there is no sample 4"),
        ],
    )
    def test_what_goes_wrong_is_named(self, tmp_path: Path, answer: Answer, problem: str) -> None:
        assert any(problem in found for found in truth(tmp_path, (0, WHOLE), (1, answer)))

    def test_another_sample_for_the_same_position(self, tmp_path: Path) -> None:
        again = Answer(0, [0], [0], [100])
        found = truth(tmp_path, (0, WHOLE), (1, OTHER), (0, again))
        assert found == ["epoch 0, rank 0, position 0: sample 3, and asked again sample 0"]

    def test_a_line_that_was_cut_by_a_kill_counts_for_nothing(self, tmp_path: Path) -> None:
        (tmp_path / "rank-1").write_text(json.dumps(OTHER)[:-3])
        assert "epoch 0: 2 positions without an answer" in truth(tmp_path, (0, WHOLE))


class TestVerdict:
    @pytest.fixture
    def twice(self, tmp_path: Path) -> GroundTruth:
        """Sample 1 came twice, and sample 3 never."""
        (tmp_path / "0").write_text(f"{json.dumps(Answer(0, [0, 1, 2, 3], [0, 1, 1, 2], [100, 101, 101, 102]))}\n")
        return GroundTruth([tmp_path / "0"], CHECKSUMS)

    def test_wrong_and_said_to_be_exact(self, twice: GroundTruth) -> None:
        verdict, receipt = Verdict(), {"exact": True, "duplicates": 0, "missing": 0}
        verdict.judge_live(twice, 1, lambda epoch: httpx.Response(200, json=receipt))
        assert len(verdict.problems) == 2
        assert str(verdict) == "FAILED"

    def test_ranks_of_a_lost_job(self, tmp_path: Path, twice: GroundTruth) -> None:
        lost = "rank 0: JobLost: job x is lost: pod 0 was restarted"
        once = GroundTruth([tmp_path / "none"], CHECKSUMS)
        for truth, lines, said in (
            (once, [lost, lost], "exact, after it was lost 1 times"),
            (once, [lost, "rank 1: InvalidInput: x"], "FAILED"),
            (once, [lost, f"Traceback\n{lost}"], "FAILED"),
            (twice, [lost], "FAILED"),
        ):
            verdict = Verdict()
            verdict.job_was_lost(lines, truth, 1)
            assert str(verdict) == said

    def test_a_rank_that_ends(self) -> None:
        line = "rank 1: JobConflict: job x goes by plan y"
        for apart, lines, said in (
            (True, line, f"refused ({line})"),
            (False, line, "FAILED"),
            (True, f"Traceback\n{line}", "FAILED"),
            (True, "rank 1: JobLost: job x is lost", "FAILED"),
        ):
            verdict = Verdict()
            verdict.rank_ended(lines, registered_apart=apart)
            assert str(verdict) == said

    def test_a_pod_that_logs_an_error_it_did_not_foresee(self) -> None:
        verdict = Verdict()
        verdict.pods_said(["all is well", "INFO job"])
        assert str(verdict) == "exact"
        verdict.pods_said(["all is well", "ERROR asyncio:\n  Traceback (most recent call last):\n  KeyError: 1"])
        assert "pod 1 has failed" in verdict.problems[0]
        assert "KeyError: 1" in verdict.problems[0]


def read_to_end(client: socket.socket) -> None:
    while client.recv(100):
        pass


class TestRelay:
    @pytest.fixture
    def echo(self) -> socket.socket:
        """A server that sends back what it gets, one connection after another."""
        server = socket.create_server(("127.0.0.1", 0))

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    while piece := connection.recv(1 << 16):
                        connection.sendall(piece)

        threading.Thread(target=serve, daemon=True).start()
        return server

    def test_a_cut_holds_bytes_back_and_keeps_them(self, echo: socket.socket) -> None:
        with echo, Relay() as relay:
            link = relay.link(echo.getsockname()[1])
            with socket.create_connection(("127.0.0.1", link.port), timeout=10) as client:
                client.sendall(b"before")
                assert client.recv(6) == b"before"
                link.cut = True
                client.sendall(b"during")
                client.settimeout(0.2)
                with pytest.raises(TimeoutError):
                    client.recv(6)
                link.cut = False
                client.settimeout(10)
                assert client.recv(6) == b"during"

    def test_an_answer_is_reset_in_the_middle(self, echo: socket.socket) -> None:
        with echo, Relay() as relay:
            link = relay.link(echo.getsockname()[1])
            link.resets = 1
            with socket.create_connection(("127.0.0.1", link.port), timeout=10) as client:
                client.sendall(b"0123456789")
                with pytest.raises(ConnectionResetError):
                    read_to_end(client)
            with socket.create_connection(("127.0.0.1", link.port), timeout=10) as client:
                client.sendall(b"again")
                assert client.recv(5) == b"again"
            assert link.answers_reset == 1

    def test_a_port_where_nobody_listens(self) -> None:
        with Relay() as relay, socket.create_server(("127.0.0.1", 0)) as server:
            link = relay.link(server.getsockname()[1])
            server.close()
            with (
                pytest.raises(ConnectionResetError),  # while it connects, or later
                socket.create_connection(("127.0.0.1", link.port), timeout=10) as client,
            ):
                read_to_end(client)


class TestTrend:
    """Noise of 5 MB about a line, every 5 s for an hour."""

    def trend(self, mb_an_hour: float, minutes: float = 60) -> str:
        seconds = np.arange(0, 60 * minutes, 5)
        noise = np.random.default_rng(1).normal(0, 5e6, len(seconds))
        warming_up = np.where(seconds < 20 * minutes, -80e6, 0)
        values = 200e6 + mb_an_hour * 1e6 * seconds / 3600 + noise + warming_up
        return trend_of(seconds.tolist(), values.tolist()).verdict(8e6)

    def test_verdicts(self) -> None:
        assert self.trend(0) == "flat"
        assert self.trend(30) == "grows"
        assert self.trend(8) == "open"
        assert self.trend(0, minutes=3) == "open"
