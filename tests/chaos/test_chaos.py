"""Seconds of what `make chaos` does for minutes, and that its instruments see what they are to see."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path
from typing import Any, ClassVar

import httpx
import numpy as np
import pytest
from tests.chaos.chaos_dataset import ChaosDataset, dataset_in_s3
from tests.chaos.chaos_run import ChaosRun, repeated_by
from tests.chaos.draw import schedule_of, setting_of
from tests.chaos.ground_truth import GroundTruth, Leg
from tests.chaos.kinds import ALL, THEMES
from tests.chaos.memory_trend import trend_of
from tests.chaos.rank import Answer
from tests.chaos.tcp_relay import Relay
from tests.chaos.verdict import Loss, Verdict
from tests.conftest import S3Server

FAULT_SECONDS = 3.0


@pytest.fixture(scope="module")
def dataset(s3_server: S3Server) -> ChaosDataset:
    return dataset_in_s3(s3_server.environment)


@pytest.mark.parametrize(
    ("seed", "policy", "volumes", "themes"),
    [
        (1, "redox", "kept", ("journals", "twins")),
        (2, "drain", "none", ("memory", "observers")),
        pytest.param(3, "redox", "mixed", ("apart", "ends"), marks=pytest.mark.variant),
        pytest.param(4, "drain", "kept", ("wiped",), marks=pytest.mark.variant),
        (5, "drain", "mixed", ("scaling",)),
        (6, "planned", "none", ("plans", "resumes")),
        pytest.param(7, "planned", "mixed", ("killed", "partitions"), marks=pytest.mark.variant),
    ],
)
def test_epochs_are_exact_through_a_schedule_of_faults(
    dataset: ChaosDataset, seed: int, policy: str, volumes: str, themes: tuple[str, ...]
) -> None:
    run = ChaosRun(setting_of(seed, policy, volumes, themes), dataset, FAULT_SECONDS)
    outcome = run.run()
    assert not outcome.problems, outcome.report(run.schedule, repeated_by(run.setting, FAULT_SECONDS))
    assert outcome.verdict.receipts, "no receipt was looked at"


def test_a_schedule_follows_from_its_seed() -> None:
    settings = [setting_of(seed) for seed in range(100)]
    assert [schedule_of(setting, 5) for setting in settings] == [schedule_of(setting_of(s), 5) for s in range(100)]
    assert {theme for setting in settings for theme in setting.themes} == {*THEMES}
    assert {fault.kind for setting in settings for fault in schedule_of(setting, 20)} == {*ALL}


CHECKSUMS = [100, 101, 102, 103]


def truth(tmp_path: Path, *answers: tuple[int, Answer]) -> list[str]:
    """The problems of two ranks with two positions each, in one epoch."""
    files = [tmp_path / "rank-0", tmp_path / "rank-1"]
    for rank, answer in answers:
        with files[rank].open("a") as file:
            file.write(json.dumps(answer) + "\n")
    return GroundTruth(Leg(files), CHECKSUMS).check(epochs=1)


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

    @pytest.mark.parametrize("kept", [0, 1])
    def test_what_a_loop_went_back_to_counts_as_it_came_then(self, tmp_path: Path, kept: int) -> None:
        (tmp_path / "rank-0.restarts").write_text(f"1 {kept}\n")
        truth(tmp_path, (0, WHOLE), (1, Answer(0, [0, 1], [1, 3], [101, 103])), (0, Answer(0, [0], [2], [102])))
        whole = GroundTruth(Leg([tmp_path / "rank-0", tmp_path / "rank-1"]), CHECKSUMS)
        found = whole.of_epoch(0)
        assert (found.twice, found.never, found.changed) == (([], [], 0) if kept == 0 else ([3], [2], 1))
        assert any("asked again sample 2" in problem for problem in whole.problems_of(0)), (
            "pods that know give the same"
        )
        assert bool(whole.problems_of(0, may_be_forgotten=True)) == (kept == 1)

    def test_a_line_that_was_cut_by_a_kill_counts_for_nothing(self, tmp_path: Path) -> None:
        (tmp_path / "rank-1").write_text(json.dumps(OTHER)[:-3])
        assert "epoch 0: 2 positions without an answer" in truth(tmp_path, (0, WHOLE))


def written(path: Path, *answers: Answer) -> Path:
    path.write_text("".join(f"{json.dumps(answer)}\n" for answer in answers))
    return path


class TestResumedTruth:
    """Two ranks had two of three positions each of six samples; what was left is dealt to one, or to two again."""

    SAMPLES = (100, 101, 102, 103, 104, 105)

    def of(self, tmp_path: Path, position: int, *answers: Answer) -> list[str]:
        first = [
            written(tmp_path / "0-0", Answer(0, [0, 1], [3, 0], [103, 100])),
            written(tmp_path / "0-1", Answer(0, [0, 1], [1, 2], [101, 102])),
        ]
        files = [written(tmp_path / f"1-{rank}", answer) for rank, answer in enumerate(answers)]
        return GroundTruth(Leg(files, 0, position, Leg(first), dealt_anew=True), self.SAMPLES).check(1)

    def test_the_rest_is_what_nobody_had_before_the_checkpoint(self, tmp_path: Path) -> None:
        assert self.of(tmp_path, 2, Answer(0, [0, 1], [4, 5], [104, 105])) == []
        assert self.of(tmp_path, 1, Answer(0, [0, 1, 2, 3], [4, 5, 0, 2], [104, 105, 100, 102])) == []

    def test_what_was_had_before_the_checkpoint_must_not_come_again(self, tmp_path: Path) -> None:
        found = self.of(tmp_path, 2, Answer(0, [0, 1], [4, 3], [104, 103]))
        assert found == [
            "epoch 0: 1 samples that came more than once: 3",
            "epoch 0: 1 samples that never came: 5",
        ]

    def test_a_second_resume_goes_on_with_the_same_rest(self, tmp_path: Path) -> None:
        files = [
            written(tmp_path / "0-0", Answer(0, [0], [3], [103])),
            written(tmp_path / "0-1", Answer(0, [0], [1], [101])),
            written(tmp_path / "1-0", Answer(0, [0, 1], [4, 5], [104, 105])),
            written(tmp_path / "2-0", Answer(0, [2, 3], [0, 2], [100, 102])),
        ]
        resumed = Leg(files[2:3], 0, 1, Leg(files[:2]), dealt_anew=True)
        assert GroundTruth(Leg(files[3:], 0, 2, resumed), self.SAMPLES).check(1) == []
        assert GroundTruth(Leg(files[3:], 0, 1, resumed), self.SAMPLES).check(1) == [
            "epoch 0: 1 positions without an answer",
            "epoch 0: 1 samples that never came: 5",
        ]

    def test_ranks_that_do_not_divide_the_rest_repeat_of_it(self, tmp_path: Path) -> None:
        rest = [Answer(0, [0, 1], [4, 5], [104, 105]), Answer(0, [0, 1], [0, 2], [100, 102])]
        assert self.of(tmp_path, 1, *rest) == []
        three = [Answer(0, [0], [4], [104]), Answer(0, [0], [5], [105]), Answer(0, [0], [4], [104])]
        assert self.of(tmp_path, 2, *three) == []
        three[2] = Answer(0, [0], [3], [103])
        assert self.of(tmp_path, 2, *three) == ["epoch 0: 1 samples that came more than once: 3"]


class TestVerdict:
    RECEIPT: ClassVar = {"exact": True, "duplicates": 0, "missing": 0, "unknown": 0}

    def of(self, tmp_path: Path, losses: list[Loss], **receipt: Any) -> str:
        """Of an epoch in which sample 1 came twice, and sample 3 never."""
        files = [written(tmp_path / "0", Answer(0, [0, 1, 2, 3], [0, 1, 1, 2], [100, 101, 101, 102]))]
        verdict, answer = Verdict(), httpx.Response(200, json=self.RECEIPT | receipt)
        verdict.judge(GroundTruth(Leg(files), CHECKSUMS), 1, losses, lambda epoch: answer, 0)
        return str(verdict)

    def test_wrong_and_said_to_be_exact(self, tmp_path: Path) -> None:
        assert self.of(tmp_path, [Loss("record", 0, 0), Loss("memory", 0, 0)]) == "FAILED"

    def test_unknown_where_nobody_can_know(self, tmp_path: Path) -> None:
        unknown = {"exact": False, "unknown": 1}
        assert self.of(tmp_path, [Loss("record", 0, 0), Loss("memory", 0, 0)], **unknown) == "unknown in epochs [0]"
        assert self.of(tmp_path, [Loss("memory", 0, 0)], **unknown) == "FAILED", "somebody knew"
        later = [Loss("record", 0, 0), Loss("memory", 3, 3)]
        assert self.of(tmp_path, later, **unknown) == "FAILED", "it was lost when it was not needed any more"

    def test_a_rank_that_ends(self) -> None:
        both, line = [Loss("record", 0, 0), Loss("memory", 1, 1)], "rank 1: JobLost: job x is gone"
        for losses, lines, said in (
            (both, line, f"refused ({line})"),
            (both[:1], line, "FAILED"),
            (both, "Traceback\n" + line, "FAILED"),
            (both, "rank 1: InvalidInput: x", "FAILED"),
        ):
            verdict = Verdict()
            verdict.rank_ended(lines, losses)
            assert str(verdict) == said


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
