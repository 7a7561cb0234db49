"""Figures of jobs, ranks and pods are what the metrics of two moments say."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from refill.errors import InvalidInput
from refill_service.top.scrape import PodScrape, Scrape
from refill_service.top.top_figures import Figures, JobFigures, PodFigures, RankFigures, figures_between
from refill_service.top.top_view import Screen, frame

JOB = 'training_job="run-1"'


def scrape(at_seconds: float, **pods: str | None) -> Scrape:
    """Of pods by name, each with lines of metrics."""
    return Scrape(
        at_seconds, {name: None if text is None else PodScrape.parse(text, name) for name, text in pods.items()}
    )


def metrics(job: str = JOB, **values: float) -> str:
    """Lines of a registered job's metrics; ``refill_takes_total`` is given as ``takes_total``."""
    values = {"share_bytes": 1, **values}
    return "".join(f"refill_{name}{{{job}}} {value}\n" for name, value in values.items())


def job_between(before: Scrape, now: Scrape) -> JobFigures:
    (job,) = figures_between(before, now).jobs
    return job


def test_rates_are_of_the_time_between_and_over_all_pods() -> None:
    before = scrape(10, a=metrics(epoch=0, requests_total=100), b=metrics(epoch=0, requests_total=50))
    now = scrape(20, a=metrics(epoch=0, requests_total=300), b=metrics(epoch=0, requests_total=150))
    assert job_between(before, now).samples_per_second == 30


def test_ratios_divide_what_came_since() -> None:
    before = scrape(0, a=metrics(epoch=1, takes_total=1000, misses_total=900, bytes_read_total=500))
    now = scrape(
        5,
        a=metrics(
            epoch=1,
            takes_total=1100,
            misses_total=905,
            bytes_read_total=900,
            bytes_wasted_total=100,
            exact_bytes_total=40,
            bytes_delivered_total=220,
        ),
    )
    job = job_between(before, now)
    assert (job.miss_rate, job.waste, job.read_amplification) == (0.05, 0.25, 2.0)
    assert job.delivered_bytes_per_second == 44


def test_a_job_that_stands_still_has_no_ratios() -> None:
    still = metrics(epoch=0, takes_total=10, bytes_read_total=10, epoch_positions=40, epoch_answered=10)
    job = job_between(scrape(0, a=still), scrape(5, a=still))
    assert (job.miss_rate, job.waste, job.read_amplification, job.epoch_ends_in_seconds) == (None, None, None, None)
    assert (job.samples_per_second, job.progress) == (0, 0.25)


def test_the_epoch_ends_when_the_rest_is_taken_at_this_speed() -> None:
    before = scrape(0, a=metrics(epoch=2, takes_total=100), b=metrics(epoch=2, takes_total=100))
    now = scrape(
        10,
        a=metrics(epoch=3, takes_total=150, epoch_positions=500, epoch_answered=100),
        b=metrics(epoch=2, takes_total=150, epoch_positions=500, epoch_answered=500),
    )
    job = job_between(before, now)
    assert (job.epoch, job.progress, job.epoch_ends_in_seconds) == (3, 0.6, 40)


@pytest.mark.parametrize("counted_before", [metrics(epoch=0, requests_total=900), ""], ids=["restarted", "new"])
def test_counters_that_began_anew_count_from_zero(counted_before: str) -> None:
    job = job_between(scrape(0, a=counted_before), scrape(10, a=metrics(epoch=0, requests_total=70)))
    assert job.samples_per_second == 7


def test_a_pod_that_was_away_counts_nothing_the_first_time() -> None:
    """What it did meanwhile is of a longer time than the one between both scrapes."""
    busy = metrics(epoch=0, requests_total=1000)
    before, now = scrape(0, a=metrics(epoch=0), b=None), scrape(10, a=busy, b=busy)
    assert job_between(before, now).samples_per_second == 100
    assert [pod.cpu_cores for pod in figures_between(before, now).pods] == [0, None]


def test_ranks_in_the_order_of_their_numbers() -> None:
    before, now = (
        "".join(
            f'refill_client_samples_total{{{JOB},rank="{rank}"}} {100 * times}\n'
            f'refill_client_data_wait_seconds_total{{{JOB},rank="{rank}"}} {rank * times / 10}\n'
            for rank in (10, 0, 2)
        )
        for times in (1, 2)
    )
    job = job_between(scrape(0, a=before), scrape(4, a=metrics(epoch=0) + now))
    assert [rank.rank for rank in job.ranks] == [0, 2, 10]
    assert [rank.data_wait_share for rank in job.ranks] == pytest.approx([0, 0.05, 0.25])
    assert [rank.samples_per_second for rank in job.ranks] == [25, 25, 25]


def received(**of_ranks: int) -> str:
    return metrics(epoch=0, requests_total=10) + "".join(
        f'refill_rank_received{{{JOB},rank="{rank.removeprefix("r")}"}} {count}\n' for rank, count in of_ranks.items()
    )


def test_a_rank_that_stands_still_while_others_are_ahead_is_waited_for() -> None:
    before = scrape(0, a=received(r0=40, r10=40, r2=40), b=received(r1=30))
    now = scrape(5, a=received(r0=44, r10=40, r2=40), b=received(r1=44))
    found = job_between(before, now).behind
    assert [(each.rank, each.received, each.most_received) for each in found] == [(2, 40, 44), (10, 40, 44)]
    figures = figures_between(before, now)
    line = "waited for: rank 2 and 1 other of run-1 (received 40, others 44)"
    assert line in lines_of(frame("http://refill:8000", figures, 5))


@pytest.mark.parametrize(
    ("seconds", "then", "now"),
    [
        pytest.param(5, received(r0=40, r1=40), received(r0=40, r1=40), id="all stand still, in step"),
        pytest.param(5, received(r0=40, r1=30), received(r0=44, r1=34), id="it goes on"),
        pytest.param(2, received(r0=40, r1=30), received(r0=44, r1=30), id="it need not have reported since"),
        pytest.param(5, received(r0=40), received(r0=44, r1=0), id="it has just come"),
        pytest.param(5, metrics(epoch=0), metrics(epoch=0), id="nobody says it"),
    ],
)
def test_nobody_is_waited_for(seconds: float, then: str, now: str) -> None:
    figures = figures_between(scrape(0, a=then), scrape(seconds, a=now))
    assert not list(figures.jobs[0].behind)
    assert "waited for" not in "".join(lines_of(frame("http://refill:8000", figures, 5)))


def test_pods_that_are_away_or_late_are_waited_for() -> None:
    """Pods are numbered as they are listed; one says of another that it is away."""
    away = metrics(epoch=0, requests_total=10, oldest_take_seconds=7.6)
    away += 'refill_peer_away{peer="1"} 1\nrefill_peer_away{peer="2"} 0\n'
    late = metrics(epoch=0, oldest_take_seconds=2.5)
    figures = figures_between(scrape(0), scrape(5, **{"http://a": away, "http://b": None, "http://c": late}))
    assert "waited for: b (away); a (answers after 8 s)" in lines_of(frame("http://refill:8000", figures, 5))


def test_a_job_that_no_rank_has_asked_anything_of() -> None:
    job = job_between(scrape(0, a=""), scrape(1, a=metrics()))
    assert (job.epoch, job.progress, job.ranks, job.receipts) == (None, None, [], None)


def test_jobs_are_told_apart() -> None:
    other = 'training_job="a"'
    now = scrape(10, p=metrics(epoch=4, requests_total=10) + metrics(other, epoch=-1, requests_total=20))
    jobs = figures_between(scrape(0, p=""), now).jobs
    assert [(job.name, job.epoch, job.samples_per_second) for job in jobs] == [("a", None, 2), ("run-1", 4, 1)]


def test_receipts_are_summed_over_pods() -> None:
    def receipts(**counts: int) -> str:
        return metrics(epoch=5) + "".join(
            f'refill_receipt_requests_total{{{JOB},outcome="{outcome}"}} {count}\n' for outcome, count in counts.items()
        )

    now = scrape(1, a=receipts(delivered=90, missing=3), b=receipts(delivered=80, missing=4))
    assert job_between(scrape(0, a=""), now).receipts == {"delivered": 170, "missing": 7}
    assert job_between(scrape(0, a=""), scrape(1, a=receipts(delivered=0))).receipts == {}, "no epoch is over"


def test_of_planned_jobs_no_receipts_are_awaited() -> None:
    now = scrape(1, a=metrics(epoch=36, requests_total=10, bytes_delivered_total=10))
    lines = lines_of(frame("http://refill:8000", figures_between(scrape(0, a=""), now), 5))
    (head,) = (number for number, line in enumerate(lines) if line.split()[-1:] == ["receipts"])
    assert lines[head + 1].split()[-1] == "-"


def test_memory_and_store_of_a_pod() -> None:
    lines = """
        refill_resident_bytes{{kind="abstract"}} 700
        refill_resident_bytes{{kind="pinned"}} 20
        refill_memory_budget_bytes 1000
        refill_memory_promised_bytes 1150
        process_resident_memory_bytes 900
        process_cpu_seconds_total {cpu}
        refill_store_bytes_total{{operation="read_range"}} {read}
        refill_store_bytes_total{{operation="size"}} {read}
        refill_store_requests_total{{operation="read_range"}} {reads}
        refill_store_request_seconds_sum{{operation="read_range"}} {seconds}
        refill_store_request_seconds_count{{operation="read_range"}} {reads}
        refill_store_errors_total{{operation="read_range",error="StoreUnavailable"}} {errors}
        refill_store_errors_total{{operation="read_range",error="Cancelled"}} {reads}
        refill_waiting_requests{{peer="1"}} 2
        refill_waiting_requests{{peer="2"}} 1
    """
    before = scrape(0, a=lines.format(cpu=1, read=0, reads=10, seconds=1, errors=1))
    now = scrape(4, a=lines.format(cpu=3, read=400, reads=18, seconds=3, errors=4))
    (pod,) = figures_between(before, now).pods
    assert pod.memory_bytes == {"abstract": 700, "pinned": 20}
    assert (pod.budget_bytes, pod.process_bytes, pod.promised_bytes, pod.cpu_cores) == (1000, 900, 1150, 0.5)
    assert (pod.store_bytes_per_second, pod.store_requests_per_second, pod.store_seconds) == (100, 2, 0.25)
    assert (pod.store_errors, pod.waiting_requests) == (3, 3)


def test_what_is_no_metrics_is_refused_in_one_line() -> None:
    with pytest.raises(InvalidInput, match=r"^http://elsewhere answered, but not with metrics$"):
        PodScrape.parse("<html>Welcome</html>", "http://elsewhere")


def test_a_job_has_the_memory_of_all_pods() -> None:
    now = scrape(5, a=metrics(job_memory_bytes=70), b=metrics(job_memory_bytes=30))
    assert job_between(scrape(0, a=""), now).memory_bytes == 100


POD = PodFigures(
    "http://refill-12.refill-peers.machine-learning.svc:8000",
    True,
    dict.fromkeys(("abstract", "remote", "recent", "pinned", "in_flight"), 999_000_000_000),
    999_000_000_000,
    999_000_000_000,
    999_000_000_000,
    31.99,
    999e9,
    12345.6,
    12.3456,
    1234,
    12,
)


def test_a_frame_fits_70_columns() -> None:
    """Long names are cut there, and figures are not."""
    job = JobFigures(
        "resnet50-imagenet-2024-06-01-attempt-12",
        1234,
        1024,
        0.999,
        360_000.0,
        1_234_567.0,
        999e9,
        999_000_000_000,
        0.55,
        0.66,
        77.77,
        {"delivered": 1, "missing": 1_234_567, "duplicates": 1_234_567},
        [RankFigures("resnet50-imagenet-2024-06-01-attempt-12", 1023, 1.0, 1_234_567.0)],
    )
    shown = io.StringIO()
    console = Console(file=shown, width=70)
    console.print(frame("http://refill.machine-learning:8000", Figures([job], [POD]), 20))
    lines = shown.getvalue().splitlines()
    assert max(map(len, lines)) <= 70, "\n".join(lines)
    words = " ".join(lines).split()
    for figure in (
        "1234",
        "100%",
        "100:00:00",
        "1,234,567",
        "999",
        "55%",
        "66%",
        "77.77",
        "31.99",
        "12345.6",
        "12345.6",
    ):
        assert figure in words, f"{figure} is cut off in\n" + "\n".join(lines)


def job_figures(
    name: str, *, samples_per_second: float = 0.0, ranks_alive: int | None = 1, ranks: int = 0
) -> JobFigures:
    of_ranks = [RankFigures(name, rank, 0.01 * rank, 100.0) for rank in range(ranks)]
    figures = (0.5, 10.0, samples_per_second, 1e6, 1_000_000, 0.0, 0.0, 1.0)
    return JobFigures(name, 3, ranks_alive, *figures, receipts={"delivered": 1}, ranks=of_ranks)


def lines_of(shown: Any, rows: int = 1000) -> list[str]:
    """What a terminal of so many rows, and 100 columns, shows."""
    output = io.StringIO()
    Console(file=output, width=100, height=rows).print(shown)
    return output.getvalue().splitlines()


def screen_of(jobs: list[JobFigures], num_pods: int) -> Screen:
    figures = Figures(jobs, [replace(POD, waiting_requests=0)] * num_pods)
    return Screen(lambda is_close: frame("http://refill:8000", figures, 20, is_close=is_close))


def test_jobs_that_read_most_come_first() -> None:
    jobs = [job_figures(name, samples_per_second=rate) for name, rate in (("a", 0), ("b", 10), ("c", 900))]
    lines = lines_of(frame("http://refill:8000", Figures(jobs, [POD]), 20))
    found = [line.split()[0] for line in lines[3:6]]
    assert found == ["c", "b", "a"]


def test_jobs_that_no_rank_uses_share_a_line() -> None:
    ended = [job_figures(f"ended-{number}", ranks_alive=0) for number in range(3)]
    older = job_figures("of-older-pods", ranks_alive=None)  # they do not say whether it has any
    lines = lines_of(frame("http://refill:8000", Figures([*ended, older, job_figures("trains")], [POD]), 20))
    assert [line.split()[0] for line in lines[3:5]] == ["trains", "of-older-pods"]
    assert "3 jobs that no rank uses, 3 MB: ended-0, ended-1, ended-2" in lines
    assert sum("ended-1" in line for line in lines) == 1
    only_ended = lines_of(frame("http://refill:8000", Figures(ended, [POD]), 20))
    assert only_ended[2].startswith("3 jobs that no rank uses")


def test_a_job_of_four_ranks_and_three_pods_fit_24_rows() -> None:
    lines = lines_of(screen_of([job_figures("run-1", samples_per_second=5, ranks=4)], 3), rows=24)
    assert len(lines) <= 24
    assert [sum(line.split()[:1] == [table] for line in lines) for table in ("memory", "work", "store")] == [1, 1, 1]
    assert lines[-1] == "q ends"


def test_what_does_not_fit_is_scrolled_to() -> None:
    jobs = [job_figures(f"run-{number:02}", samples_per_second=1) for number in range(30)]
    screen = screen_of(jobs, 8)
    every = lines_of(screen.frame_of(True))
    seen = []
    for _ in range(10):
        *shown, status = lines_of(screen, rows=24)
        assert len(shown) == 23
        first = int(re.match(r"lines (\d+) to \d+ of (\d+): arrows and pages scroll, q ends", status)[1])  # type: ignore[index]
        assert shown == every[first - 1 : first + 22]
        seen.append(first)
        screen.scroll(lines=0, pages=1)
    assert seen[:3] == [1, 24, 47]
    assert seen[-1] == len(every) - 22, "and no further"
    assert lines_of(screen, rows=24)[:23] == every[-23:]
    screen.scroll(lines=-1, pages=0)
    assert lines_of(screen, rows=24)[:23] == every[-24:-1]
    screen.scroll(lines=0, pages=-100)
    assert lines_of(screen, rows=24)[0] == every[0]
