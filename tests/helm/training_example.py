"""What does helm/examples/train.yaml hold, the training Job that users copy?"""

from __future__ import annotations

from typing import Any

import yaml
from tests.helm.rendering import CHART

__all__ = ["EXAMPLE", "TEXT", "variables"]

TEXT = (CHART.parent / "examples" / "train.yaml").read_text()
EXAMPLE: list[dict[str, Any]] = list(yaml.safe_load_all(TEXT))


def variables(template: dict[str, Any]) -> dict[str, str]:
    """Of the container of a pod template; empty where they have no plain value."""
    (container,) = template["spec"]["containers"]
    return {variable["name"]: variable.get("value", "") for variable in container["env"]}
