"""What do the values of the chart mean? Its README, made of the comments in values.yaml: ``make chart-files``.

python helm/chart_readme.py           write helm/refill/README.md
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

CHART = Path(__file__).parent / "refill"
_HEAD = """# The Helm chart of refill

{description}. Kubernetes {kubernetes}.

```console
helm install refill ./helm/refill -f my-values.yaml
helm test refill
```

`docs/INSTALL.md` of the repository says how to install, size, protect and upgrade a release. A misspelt value is
refused. Names in camelCase are of Kubernetes and of this chart. Those with underscores, under `settings` and `store`,
are refill's.

<!-- Made of values.yaml by `make chart-files`. -->
"""


class Value(NamedTuple):
    section: str
    path: str
    default: Any
    comment: str


def readme() -> str:
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    text = _HEAD.format(description=about["description"], kubernetes=about["kubeVersion"].removesuffix(".0-0"))
    section = ""
    for value in values((CHART / "values.yaml").read_text()):
        if value.section != section:
            section = value.section
            text += f"\n## {section}\n\n| value | default | what it is |\n| --- | --- | --- |\n"
        default = f"`{json.dumps(value.default)}`" if value.default is not None else ""
        text += f"| `{value.path}` | {_cell(default)} | {_cell(value.comment)} |\n"
    return text


def _cell(text: str) -> str:
    return text.replace("|", r"\|").replace("<", r"\<")


def values(text: str) -> Iterator[Value]:
    """In the order of the file. A mapping none of whose parts is explained is one value."""
    section, comments, path = "", [], []
    explained: list[tuple[str, str, str]] = []
    for line in text.splitlines():
        if heading := re.fullmatch(r"# --- (.*?) -+", line):
            section, comments = heading[1], []
        elif comment := re.fullmatch(r" *# ?(.*)", line):
            comments.append(comment[1])
        elif key := re.match(r"( *)([A-Za-z_]\w*):", line):
            path = [*path[: len(key[1]) // 2], key[2]]
            explained.append((section, ".".join(path), " ".join(comments)))
            comments = []
        else:
            comments = []
    with_parts = {path.rpartition(".")[0] for _, path, comment in explained if comment}
    defaults = yaml.safe_load(text)
    for of_section, found, comment in explained:
        default: Any = defaults
        for name in found.split("."):
            default = default.get(name, "") if isinstance(default, dict) else ""  # within a list: part of its default
        if found in with_parts:
            if comment:
                yield Value(of_section, found, None, comment)
        elif comment or found.rpartition(".")[0] in with_parts:
            yield Value(of_section, found, default, comment)


if __name__ == "__main__":
    (CHART / "README.md").write_text(readme())
