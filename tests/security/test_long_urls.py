"""A URL has 2,048 letters at most, whoever names it and wherever: pods hold it, log it, and send it to stores."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tests.membership.pods_in_process import PodsInProcess

from refill.errors import InvalidInput
from refill.protocol.job_spec import JobSpec

LETTERS = 2048
JSON = {"content-type": "application/json"}


def url_of(num_letters: int) -> str:
    return "s3://bucket/".ljust(num_letters, "x")


def settings_of(url: str, policy: str) -> dict[str, Any]:
    found = JobSpec("job", "s3://bucket/x", policy=policy, memory_bytes=2_000_000).to_dict()
    return found | {"dataset": url}


@pytest.fixture(scope="module")
def pods() -> Iterator[PodsInProcess]:
    with PodsInProcess(2) as found:
        yield found


def sent(pods: PodsInProcess, asker: str, method: str, path: str, body: Any = None) -> tuple[int, str]:
    content = None if body is None else json.dumps(body).encode()
    status, _, answer = pods.do(pods.request(asker, 0, method, path, content, JSON))
    return status, json.loads(answer)["message"]


ROUTES = {
    "register": lambda url, policy: ("client", "PUT", "/v1/jobs/job", {"dataset": url, "policy": policy}),
    "dataset": lambda url, policy: ("client", "GET", f"/v1/dataset?url={url}", None),
    "lengths": lambda url, policy: ("client", "POST", f"/v1/dataset/lengths?url={url}", None),
    "column": lambda url, policy: ("client", "POST", f"/v1/dataset/columns/cls?url={url}", None),
    "introduce": lambda url, policy: ("peer", "PUT", "/peer/v1/jobs/job/planned", {"spec": settings_of(url, policy)}),
    "lead": lambda url, policy: ("peer", "PUT", "/peer/v1/jobs/job", {"spec": settings_of(url, policy)}),
    "begins": lambda url, policy: ("peer", "POST", "/peer/v1/jobs/job/begins", {"spec": settings_of(url, policy)}),
    "opening": lambda url, policy: ("peer", "POST", "/peer/v1/jobs/job/opening", {"dataset": url}),
}
"""All that take a URL. `refill warm` registers its job."""


@pytest.mark.parametrize("policy", ["planned", "redox"])
@pytest.mark.parametrize("route", ROUTES)
def test_a_url_above_two_kib_is_refused(pods: PodsInProcess, route: str, policy: str) -> None:
    """One as long as may be is another dataset that pods may not read here."""
    status, message = sent(pods, *ROUTES[route](url_of(LETTERS + 1), policy))
    assert status == 400, message
    assert "2,048" in message or "2048" in message, message
    assert len(message) < 400, "it is said in whole"
    status, message = sent(pods, *ROUTES[route](url_of(LETTERS), policy))
    assert status == 403, message


def test_clients_refuse_it_before_pods_are_asked() -> None:
    with pytest.raises(InvalidInput, match="has 2,049 letters, and a URL here at most 2,048"):
        JobSpec("job", url_of(LETTERS + 1))


def test_routes_that_take_a_url_are_known(pods: PodsInProcess) -> None:
    """Of clients: one that is added belongs above."""
    status, _, answer = pods.do(pods.request("client", 0, "GET", "/openapi.json"))
    assert status == 200, "pods describe no routes"
    found = {
        path
        for path, methods in json.loads(answer)["paths"].items()
        for route in methods.values()
        for parameter in route.get("parameters", ())
        if "url" in parameter["name"] or "dataset" in parameter["name"]
    }
    assert found == {"/v1/dataset", "/v1/dataset/lengths", "/v1/dataset/columns/{column}"}
