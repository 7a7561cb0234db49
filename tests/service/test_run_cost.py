"""`refill cost` gives the papers' answers, and takes any prices."""

from __future__ import annotations

import json
from typing import Any

import pytest

from refill_service.cli import main
from refill_service.planning.provider_prices import PRICES_AS_OF

RUN = ("--run-seconds", 36_000, "--vm-price", 1, "--nodes", 4, "--epochs", 10)
REQUESTS = ("--gets", 100_000, "--listed", 100_000, "--fetch-size", 2000)
PRICES = ("--class-a-price", 5e-6, "--class-b-price", 4e-7, "--disk-price", 0.1, "--bucket-price", 0.02)
SIZES = ("--system-gb", 20, "--data-gb", 50, "--cache-gb", 2)


def cost(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert main(["cost", "--json", *map(str, arguments)]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_run_with_a_service_that_fetches(capsys: pytest.CaptureFixture[str]) -> None:
    found = cost(capsys, *RUN, *REQUESTS, *PRICES, *SIZES)
    assert (found["api"], found["storage"], found["vms"]) == pytest.approx((0.65, 9.80, 40.00))
    assert found["total"] == pytest.approx(50.45)


def test_without_a_service_the_bucket_is_listed_once_an_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    found = cost(capsys, *RUN, *REQUESTS[:4], *PRICES, *SIZES)
    assert found["api"] == pytest.approx(10 * (100 * 5e-6 + 100_000 * 4e-7))
    odd = cost(capsys, *RUN, "--gets", 7, "--listed", 1001, "--fetch-size", 3, *PRICES)
    assert odd["api"] == pytest.approx(10 * (2 * 3 * 5e-6 + 7 * 4e-7)), "pages and fetches are whole"


def test_without_a_bucket_each_machine_has_the_dataset(capsys: pytest.CaptureFixture[str]) -> None:
    found = cost(capsys, *RUN, *PRICES, *SIZES, "--no-bucket")
    assert (found["api"], found["storage"]) == (0, pytest.approx(4 * 0.1 * 70))


@pytest.mark.parametrize(
    ("seconds", "dollars"),
    [
        *((223.91, 0.10), (1581.37, 0.72), (358.87, 0.16), (267.07, 0.12), (245.11, 0.11)),
        *((609.03, 0.28), (1587.02, 0.72), (557.71, 0.25), (502.87, 0.23), (365.85, 0.17)),
    ],
)
def test_machines_of_table_2(capsys: pytest.CaptureFixture[str], seconds: float, dollars: float) -> None:
    """DELI: three nodes, by the run times of two epochs that are published with it."""
    found = cost(capsys, "--nodes", 3, "--vm-price", 0.545, "--run-seconds", seconds, "--epochs", 2)
    assert round(found["vms"], 2) == dollars


def test_prices_of_a_provider_hold_where_none_are_given(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--run-seconds", 0, "--vm-price", 0, "--gets", 10**6, "--data-gb", 100)
    r2 = cost(capsys, *options, "--provider", "r2")
    assert (r2["api"], r2["storage"]) == pytest.approx((0.36, 1.5))
    assert cost(capsys, *options, "--provider", "r2", "--class-b-price", 1e-6)["api"] == pytest.approx(1.0)
    assert r2["prices_as_of"] == PRICES_AS_OF


def test_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cost", *map(str, (*RUN, *REQUESTS, *PRICES, *SIZES))]) == 0
    shown = capsys.readouterr().out
    for line in ("requests          0.65 USD", "storage           9.80 USD a month", "machines         40.00 USD"):
        assert line in shown


def test_help_says_what_each_option_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["cost", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for text in (
        "--run-seconds S how long the run takes",
        "--vm-price USD dollars for an hour of one machine",
        "--gets G GETs of an epoch, of all machines together",
        "--fetch-size F a service fetches so many samples at once",
        "--cache-gb GB gigabytes on each machine's disk that caches",
        f"whose prices hold where none are given; as of {PRICES_AS_OF}",
    ):
        assert text in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--run-seconds, --vm-price"),
        ((*RUN, "--vm-price", "-1"), "argument --vm-price: must be a number of at least 0, got '-1'"),
        ((*RUN, "--vm-price", "nan"), "argument --vm-price: must be a number of at least 0, got 'nan'"),
        ((*RUN, "--nodes", "0"), "argument --nodes: must be a whole number of at least 1, got '0'"),
        ((*RUN, "--gets", "1.5"), "argument --gets: must be a whole number of at least 0, got '1.5'"),
        ((*RUN, "--no-bucket", "--gets", "5"), "--no-bucket has no requests"),
    ],
)
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], arguments: tuple[object, ...], message: str) -> None:
    assert main(["cost", *map(str, arguments)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1, error
