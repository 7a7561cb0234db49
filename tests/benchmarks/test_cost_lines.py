"""`cost_compare` adds up what each way to read a dataset costs, and finds where the lines cross."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from benchmarks.papers.cost_compare import main
from benchmarks.papers.cost_lines import (
    MEMORY_PARTS,
    SAMPLE_SIZES,
    WAYS,
    ComparedRun,
    Line,
    Reads,
    cheapest_by_epochs,
    cheapest_by_memory,
    cheapest_by_sample_size,
    line_of,
    with_memory_parts,
)

from refill_service.planning.run_cost import PROVIDERS

RUN = ComparedRun(
    num_samples=100_000, sample_bytes=100_000, memory_fraction=0.1, epochs=10, nodes=2, vm_hour=3.0, most_simulated=1024
)


def dollars(line: Line, run: ComparedRun = RUN, provider: str = "s3") -> float:
    return line.cost(run, PROVIDERS[provider]).total


def test_the_bucket_alone_by_hand() -> None:
    line = line_of("bucket alone", RUN)
    # 32 GETs at once, each 30 ms and 0.1 ms; a listing of 100 pages.
    seconds = -(-50_000 // 32) * (0.03 + 1e-4) + 100 * 0.03
    found = line.cost(RUN, PROVIDERS["s3"])
    assert found.api == pytest.approx(10 * (100 * 5e-6 + 100_000 * 4e-7))
    assert found.storage == pytest.approx(10 * 0.023)
    assert found.vms == pytest.approx(2 * 3.0 * 10 * seconds / 3600)
    assert found.traffic == 0
    elsewhere = line.cost(replace(RUN, elsewhere=True), PROVIDERS["gcs"])
    assert elsewhere.traffic == pytest.approx(10 * 10 * 0.12)


def test_a_copy_is_read_once_and_kept_on_each_disk() -> None:
    line = line_of("copied to disks", RUN)
    run = replace(RUN, disk_gb=0.1, elsewhere=True)
    found = line.cost(run, PROVIDERS["s3"])
    assert found.api == pytest.approx(100 * 5e-6 + 2 * 100_000 * 4e-7)
    assert found.storage == pytest.approx(10 * 0.023 + 2 * 10 * 0.1)
    assert found.traffic == pytest.approx(2 * 10 * 0.09)


@pytest.mark.parametrize(
    ("name", "gets", "samples"),
    [
        ("exact, never", 0.9, 0.9),
        ("exact K=8", 0.29, 2.35),
        ("planned K=16", 1 / 16, 1.0),
        ("DELI 50/50", 1.05, 1.05),
    ],
)
def test_what_later_epochs_read(name: str, gets: float, samples: float) -> None:
    line = line_of(name, RUN)
    assert line.later.gets == pytest.approx(gets, rel=0.06)
    assert line.later.samples == pytest.approx(samples, rel=0.06)
    assert line.first.gets >= line.later.gets


def test_computing_hides_reads() -> None:
    line = line_of("planned K=16", RUN)
    slow = replace(RUN, compute_samples_per_second=100.0)
    assert line.hours(slow) == pytest.approx(10 * 1000 / 3600)
    assert line.hours(RUN) < line.hours(slow)


def test_memory_that_is_rented_costs() -> None:
    line = line_of("planned K=16", RUN)
    rented = replace(RUN, memory_gb_hour=2.0)
    assert dollars(line, rented) - dollars(line) == pytest.approx(2.0 * 1.0 * line.hours(RUN))


def test_lines_cross_where_it_is_said() -> None:
    lines = [Line("bucket alone", Reads(1, 1), Reads(1, 1)), Line("copied to disks", Reads(2, 2), Reads(0, 0))]
    run = replace(RUN, disk_gb=0.5)
    (one, first), (crossing, second) = cheapest_by_epochs(lines, run, "s3")
    assert (one, first, second) == (1, "bucket alone", "copied to disks")
    for epochs, cheaper, dearer in ((crossing - 1, *lines), (crossing, *lines[::-1])):
        assert dollars(cheaper, replace(run, epochs=epochs)) < dollars(dearer, replace(run, epochs=epochs)), epochs


def test_lines_cross_by_the_size_of_a_sample() -> None:
    few_gets, few_bytes = (
        Line(name, reads, reads) for name, reads in (("exact K=64", Reads(0.1, 4)), ("exact, never", Reads(1, 1)))
    )
    run = replace(RUN, elsewhere=True, vm_hour=0.0)
    (least, first), (crossing, second) = cheapest_by_sample_size([few_gets, few_bytes], run, "s3")
    assert (least, first, second) == (SAMPLE_SIZES[0], "exact K=64", "exact, never")
    # For each sample 0.9 GETs more at 4e-7, and three samples less at 9e-11 a byte.
    by_hand = 0.9 * 4e-7 / (3 * 9e-11)
    assert by_hand <= crossing <= by_hand * 1.051


def test_lines_cross_by_memory() -> None:
    run = replace(RUN, vm_hour=0.0)
    few_gets = {
        each: [
            Line("planned K=16", Reads(1 / 16, 1), Reads(1 / 16, 1)),
            Line("exact K=64", *[Reads(0.006 / each.memory_fraction, 4)] * 2),
        ]
        for each in with_memory_parts(run)
    }
    # As many GETs where a part of 0.006 * 16 = 0.096 is in memory.
    assert cheapest_by_memory(few_gets, "s3") == [(0.02, "planned K=16"), (0.1, "exact K=64")]


def test_memory_that_is_rented_may_cost_more_than_it_saves() -> None:
    run = replace(RUN, vm_hour=0.0, memory_gb_hour=3.0, compute_samples_per_second=1000.0)
    lines = {
        each: [Line("bucket alone", Reads(1, 1), Reads(1, 1)), Line("planned K=16", Reads(1 / 16, 1), Reads(1 / 16, 1))]
        for each in with_memory_parts(run)
    }
    # 0.38 dollars of requests saved, 0.005 of them listings; all 10 GB in memory for 1,000 s would be 8.33.
    assert cheapest_by_memory(lines, "s3") == [(0.02, "planned K=16"), (0.05, "bucket alone")]


def test_a_way_that_a_part_of_memory_has_no_room_for_is_not_the_cheapest_there() -> None:
    first, *others = with_memory_parts(replace(RUN, vm_hour=0.0))
    bucket, redox = (Line(name, *[Reads(gets, 1)] * 2) for name, gets in (("bucket alone", 1), ("redox K=64", 0.1)))
    lines = {first: [bucket]} | {each: [bucket, redox] for each in others}
    assert cheapest_by_memory(lines, "s3") == [(0.02, "bucket alone"), (0.05, "redox K=64")]


def test_the_parts_of_memory_that_are_looked_at() -> None:
    def parts(run: ComparedRun) -> list[float]:
        return [each.memory_fraction for each in with_memory_parts(run)]

    assert parts(RUN) == list(MEMORY_PARTS)
    assert parts(replace(RUN, memory_fraction=0.0999)) == [*MEMORY_PARTS[:2], 0.0999, *MEMORY_PARTS[3:]], "not twice"
    assert parts(replace(RUN, memory_fraction=0.12)) == [*MEMORY_PARTS[:3], 0.12, *MEMORY_PARTS[3:]]
    assert parts(replace(RUN, num_samples=20)) == list(MEMORY_PARTS[1:]), "2 % of 20 samples is none"


class TestCommand:
    def test_for_programs(self, capsys: pytest.CaptureFixture[str]) -> None:
        found = self.compared(capsys, "--simulate-samples", "256", "--elsewhere", "--disk-price", "0.1", "--json")
        answer = json.loads(found)
        assert [each["way"] for each in answer["ways"]] == list(WAYS)
        for each in answer["ways"]:
            assert set(each["cost"]) == set(PROVIDERS)
            parts = each["cost"]["gcs"]
            assert parts["total"] == pytest.approx(sum(parts[name] for name in ("api", "storage", "vms", "traffic")))
        kept = {each["way"] for each in answer["ways"] if each["keeps_order"]}
        for of_provider in answer["cheapest"].values():
            assert all(step["way"] in kept for step in of_provider["order_kept"]["by_epochs"])
            assert of_provider["any_order"]["by_epochs"][0]["from_epochs"] == 1
            by_memory = of_provider["order_kept"]["by_memory"]
            assert [step["from_fraction"] for step in by_memory] == sorted({s["from_fraction"] for s in by_memory})
            assert by_memory[0]["from_fraction"] == MEMORY_PARTS[0]
            assert {step["way"] for step in by_memory} <= kept

    def test_for_people_who_give_too_little_memory_for_a_way(self, capsys: pytest.CaptureFixture[str]) -> None:
        shown = self.compared(capsys, "--simulate-samples", "256", "--memory", "1%")
        last = shown.splitlines()[-1]
        assert last.startswith("left out: memory that holds no chunk (redox K=64 at 1, 2%)"), last
        assert last.endswith("; give more memory, or --simulate-samples more"), last
        for text in (
            "planned K=16",
            "cheapest, of 1 to 1,000 epochs",
            "cheapest of 3 epochs, by the size of a sample",
            "cheapest of 3 epochs, by the part of the dataset in memory",
            "memory at 1, 2, 5, 10, 15, 20, 35, 50, 100%",
        ):
            assert text in shown

    @pytest.mark.variant
    def test_providers_that_agree_share_a_line(self, capsys: pytest.CaptureFixture[str]) -> None:
        shown = self.compared(capsys, "--simulate-samples", "256")
        tables = [table for table in shown.split("\n\n") if table.startswith("cheapest")]
        assert len(tables) == 3
        for table in tables:
            lines = re.findall(r"^  (\w+(?:, \w+)*) +(any order|order kept) +(.+)$", table, re.MULTILINE)
            assert len({(order, ways) for _, order, ways in lines}) == len(lines), table
            for order in ("any order", "order kept"):
                named = [name for names, of_order, _ in lines if of_order == order for name in names.split(", ")]
                assert sorted(named) == sorted(PROVIDERS), table
        assert "  s3, gcs, r2  " in shown

    def test_of_fewer_samples_than_a_chunk_has(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["--samples", "20", "--memory", "50%", "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        found = [each["way"] for each in answer["ways"]]
        assert found == [name for name, way in WAYS.items() if way.chunk_size <= 8]
        assert answer["left_out"] == [
            "chunks of more than 20 samples (exact K=64, redox K=64)",
            "memory that holds no chunk (planned K=16 at 5, 10, 15, 20, 35, 50%)",
        ]

    def test_of_two_samples(self, capsys: pytest.CaptureFixture[str]) -> None:
        """A tenth of them, the default, would be none: one is held."""
        assert main(["--samples", "2"]) == 0
        shown = capsys.readouterr().out.splitlines()
        assert shown[0].startswith("2 samples, 200 kB; 50.0% of them in memory")
        larger = "exact K=8, exact K=64, planned K=16, redox K=64"
        left_out = f"chunks of more than 2 samples ({larger})"
        assert [line for line in shown if "left out" in line] == [f"left out: {left_out}"]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("--samples", "1"), "--samples must be at least 2"),
            (("--samples", "10000", "--memory", "0.001%"), "raise the memory"),
            (("--samples", "10000", "--memory", "200%"), "is not a part of the dataset"),
            (("--samples", "10000", "--store-bandwidth", "0"), "--store-bandwidth must be more than 0"),
        ],
    )
    def test_bad_input_is_one_line(
        self, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
    ) -> None:
        assert main(list(arguments)) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1, error

    def compared(self, capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
        assert main(["--samples", "20000", "--nodes", "2", "--epochs", "3", "--vm-price", "1", *arguments]) == 0
        return capsys.readouterr().out
