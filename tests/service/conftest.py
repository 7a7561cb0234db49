"""Where do tests of packing pack to? A folder and an S3 bucket."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(params=["file", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return (tmp_path / "dest").as_uri()
    return f"s3://{request.getfixturevalue('s3_environment').new_bucket()}/data/set"
