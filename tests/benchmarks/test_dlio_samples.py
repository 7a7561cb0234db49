"""What DLIO is given to read: files of MLPerf's sizes, no two the same, that its readers take."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import pytest
from benchmarks.dlio.workloads import WORKLOADS, sample_bytes
from PIL import Image


def test_a_jpeg_has_exactly_its_size_and_is_an_image() -> None:
    workload = WORKLOADS["retinanet"]
    made = sample_bytes(workload)
    first, second = made(0), made(1)
    assert len(first) == len(second) == 322_957
    assert first != second
    image = np.asarray(Image.open(io.BytesIO(second)))
    assert image.nbytes > 100_000
    with pytest.raises(ValueError, match="bytes too many"):
        sample_bytes(replace(workload, sample_bytes=500))


@pytest.mark.parametrize("name", ["resnet50", "unet3d"])
def test_arrays_hold_their_bytes(name: str) -> None:
    workload = replace(WORKLOADS[name], sample_bytes=10_000)
    made = sample_bytes(workload)
    arrays = [np.load(io.BytesIO(made(number))) for number in (0, 1)]
    values = [each["x"] if workload.format == "npz" else each for each in arrays]
    assert [each.nbytes for each in values] == [10_000, 10_000]
    assert (values[0] != values[1]).any()
