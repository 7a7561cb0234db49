"""Errors across the wire and across processes: the same class, text and details on the other side."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest

from refill import errors
from refill.errors import InvalidInput, PodUnreachable, RefillError, UnknownJob, error_from_wire

KINDS = [getattr(errors, name) for name in errors.__all__ if name not in ("error_from_wire", "job_lost")]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_kind_arrives_as_itself(kind: type[RefillError]) -> None:
    sent = kind("what was wrong", sample=7, names=["a"], source="b", status=3)
    wire = json.loads(json.dumps(sent.to_wire()))
    for found in (error_from_wire(wire, status=kind.status, source="pod"), pickle.loads(pickle.dumps(sent))):
        assert type(found) is kind
        assert (str(found), found.details) == (str(sent), sent.details)


@pytest.mark.parametrize(
    ("answer", "status", "kind"),
    [
        ("<html>", 502, PodUnreachable),
        ({"error": {"code": 503}}, 503, PodUnreachable),
        ({"error": ["x"]}, 500, PodUnreachable),
        ({"error": "NotOurs"}, 404, InvalidInput),
        ({"error": "UnknownJob", "details": [1]}, 404, UnknownJob),
        ({"error": "UnknownJob", "message": "who?", "details": {"message": 1}}, 404, UnknownJob),
        ({}, 404, InvalidInput),
        (None, 500, PodUnreachable),
    ],
)
def test_answers_that_are_not_refills_become_errors_too(answer: Any, status: int, kind: type[RefillError]) -> None:
    assert type(error_from_wire(answer, status=status, source="pod")) is kind
