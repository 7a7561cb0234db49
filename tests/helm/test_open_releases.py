"""A release is closed, or open because its values say so; half a set-up is refused, and the notes say what is open."""

from __future__ import annotations

import itertools
import re
import shlex
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml
from tests.helm.rendering import CHART, VALUES_FILES, merged, release, release_as_given, values_in

TOKENS = {"access": {"clientTokens": "tokens", "peerToken": "token-of-pods"}}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "access.clientTokens is empty"),
        ({"access": {"peerToken": "token-of-pods"}}, "access.clientTokens is empty"),
        ({"tls": {"secret": "a", "peerSecret": "b"}}, "access.clientTokens is empty"),
        ({"insecure": False}, "or set insecure=true"),
        ({"insecure": "yes"}, "at '/insecure': got string, want boolean"),
        ({"access": {"clientTokens": "tokens"}}, "access.clientTokens needs access.peerToken or tls.peerSecret"),
        ({"access": {"clientTokens": "t"}, "tls": {"secret": "a"}}, "needs access.peerToken or tls.peerSecret"),
        (TOKENS | {"insecure": True}, "insecure is true, and access.clientTokens is set"),
        (
            TOKENS | {"networkPolicy": {"enabled": False, "clients": [{"podSelector": {}}]}},
            "networkPolicy.clients is set, and networkPolicy.enabled=false",
        ),
        (
            TOKENS | {"networkPolicy": {"enabled": False, "metrics": [{"podSelector": {}}]}},
            "networkPolicy.metrics is set, and networkPolicy.enabled=false",
        ),
        (TOKENS | {"credentials": {"variables": {"HF_TOKEN": "token"}}}, "credentials.existingSecret, which is empty"),
        (
            TOKENS | {"credentials": {"existingSecret": "s", "variables": {"AWS_ACCESS_KEY_ID": "mine"}}},
            "AWS_ACCESS_KEY_ID is given by credentials.accessKeyIdKey",
        ),
    ],
    ids=str,
)
def test_half_a_set_up_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(helm_python.HelmError) as refused:
        release_as_given(values)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    "values",
    [
        {"insecure": True},
        {"insecure": True, "access": {"peerToken": "token-of-pods"}},
        TOKENS,
        {"access": {"clientTokens": "tokens"}, "tls": {"peerSecret": "b"}},
        {"access": {"clientTokens": "tokens"}, "replicas": 1},
    ],
    ids=str,
)
def test_a_whole_one_is_not(values: dict[str, Any]) -> None:
    assert release_as_given(values).of_kind("StatefulSet")


@pytest.mark.parametrize("path", VALUES_FILES, ids=lambda path: path.stem)
def test_every_values_file_says_which_it_is(path: Path) -> None:
    assert release_as_given(values_in(path)).of_kind("StatefulSet")


def test_the_notes_say_what_default_values_leave_open() -> None:
    notes = release({"insecure": True}).notes
    for line in (
        "- Port 8000: whoever reaches it may register, read and end every job. Closed by access.clientTokens.",
        "- Port 8001: so may whoever reaches it where the network enforces no policies.",
        "- Jobs may name every bucket that the pods can read. Closed by settings.dataset_urls.",
        "- Samples come and go in clear at port 8000. Closed by tls.secret.",
        "- Samples go in clear between pods. Closed by tls.peerSecret.",
        "- Port 8002: whoever reaches it sees the names of all jobs. Closed by networkPolicy.metrics.",
    ):
        assert line in notes, line


def test_the_notes_say_nothing_of_what_is_closed() -> None:
    closed: dict[str, Any] = TOKENS | {
        "tls": {"secret": "a", "peerSecret": "b"},
        "settings": {"dataset_urls": ["s3://bucket/images"]},
        "networkPolicy": {"metrics": [{"podSelector": {}}]},
    }
    assert "What is open" not in release(closed).notes
    assert "Tokens and samples come and go in clear" in release(TOKENS).notes


def installations() -> list[str]:
    """Every `helm install` that README and docs show."""
    root = CHART.parents[1]
    texts = [
        path.read_text().replace("\\\n", " ") for path in (root / "README.md", *sorted((root / "docs").glob("*.md")))
    ]
    return [line for text in texts for line in re.findall(r"^helm install .*", text, re.MULTILINE)]


@pytest.mark.parametrize("command", installations())
def test_installations_shown_are_taken(command: str) -> None:
    words = shlex.split(command, comments=True)
    values: dict[str, Any] = {}
    for option, given in itertools.pairwise(words):
        if option == "-f":
            values |= TOKENS if given == "my-values.yaml" else values_in(CHART.parents[1] / given)
        if option == "--set":
            values = merged(values, helm_python.parse_set_string(given))
    assert release_as_given(values).of_kind("StatefulSet")


def test_values_shown_are_taken() -> None:
    text = (CHART.parents[1] / "docs" / "INSTALL.md").read_text()
    shown = [
        yaml.safe_load(block)
        for block in re.findall(r"^```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        if "apiVersion" not in block  # whole objects
    ]
    assert len(shown) >= 3
    for values in shown:
        assert release_as_given(values).of_kind("StatefulSet")
