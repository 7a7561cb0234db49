"""`refill cost`: what a run costs, with any prices."""

from __future__ import annotations

import json
from typing import Any

import pytest

from refill_service.cli import main
from refill_service.planning.run_cost import PRICES_AS_OF

RUN = ("--run-seconds", 36_000, "--vm-price", 1, "--nodes", 4, "--epochs", 10, "--gets", 100_000, "--data-gb", 50)


def cost(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert main(["cost", "--json", *map(str, arguments)]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    found = cost(capsys, *RUN)
    assert (found["requests"], found["storage"], found["machines"]) == pytest.approx((0.40, 1.15, 40.00))
    assert found["total"] == pytest.approx(41.55)


def test_prices_of_a_provider_hold_where_none_are_given(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--run-seconds", 0, "--vm-price", 0, "--gets", 10**6, "--data-gb", 100)
    r2 = cost(capsys, *options, "--provider", "r2")
    assert (r2["requests"], r2["storage"]) == pytest.approx((0.36, 1.5))
    assert cost(capsys, *options, "--provider", "r2", "--class-b-price", 1e-6)["requests"] == pytest.approx(1.0)
    assert cost(capsys, *options, "--bucket-price", 0.01)["storage"] == pytest.approx(1.0)
    assert r2["prices_as_of"] == PRICES_AS_OF


def test_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cost", *map(str, RUN)]) == 0
    shown = capsys.readouterr().out
    for line in ("requests          0.40 USD", "storage           1.15 USD a month", "machines         40.00 USD"):
        assert line in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--run-seconds, --vm-price"),
        ((*RUN, "--vm-price", "-1"), "argument --vm-price: must be at least 0, got -1"),
        ((*RUN, "--vm-price", "nan"), "argument --vm-price: must be at least 0, got nan"),
        ((*RUN, "--nodes", "0"), "argument --nodes: must be at least 1, got 0"),
        ((*RUN, "--gets", "1.5"), "argument --gets: '1.5' is not a whole number"),
    ],
)
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], arguments: tuple[object, ...], message: str) -> None:
    assert main(["cost", *map(str, arguments)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1, error
