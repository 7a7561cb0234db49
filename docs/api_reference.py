"""Writes docs/API.md from the code: ``python docs/api_reference.py``. A test compares."""

from __future__ import annotations

import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

import refill
from refill import errors
from refill.job_samples import JobSamples
from refill_service.pod.cache_node import CacheNode
from refill_service.serving.app import client_app
from refill_service.settings import Settings

PAGE = Path(__file__).with_name("API.md")
_HEAD = """# API reference

Every class, function, error and route of refill, to look things up in. To learn how they are used together, read
[The PyTorch client](CLIENT.md) and [The pod](POD.md) first. `python docs/api_reference.py` writes this page from the
code.

"""


def page() -> str:
    return _HEAD + "".join([_python(), _errors(), _http()])


def _python() -> str:
    parts = ["## Python: `import refill`\n\n"]
    written: list[Any] = []
    for name in refill.__all__:
        found = getattr(refill, name)
        if inspect.isclass(found) and issubclass(found, Exception):
            continue
        parts.append(f"### `refill.{name}`\n\n{_signature(name, found)}{_text(found)}")
        if inspect.isclass(found) and not issubclass(found, tuple):
            members = _public(found)
            parts += [_member(name, member, each) for member, each in members if each not in written]
            if also := [f"`{member}`" for member, each in members if each in written]:
                parts.append(f"As `CacheDataset` it has {', '.join(also)}.\n\n")
            written += [each for _, each in members]
    return "".join(parts)


def _public(kind: type) -> list[tuple[str, Any]]:
    """Methods and properties that are written down here, in their order, not those of torch, nor those that refill
    calls itself."""
    own = [member for base in (kind, JobSamples) if base in kind.__mro__ for member in vars(base).items()]
    members = {name: each for name, each in reversed(own) if inspect.isfunction(each) or isinstance(each, property)}
    said = [(name, each, inspect.getdoc(each) or "") for name, each in reversed(members.items())]
    return [(name, each) for name, each, text in said if text and name[0] != "_" and "Called " not in text]


def _member(of: str, name: str, found: Any) -> str:
    if isinstance(found, property):
        return f"#### `{of}.{name}`\n\n{_text(found)}"
    return f"#### `{of}.{name}`\n\n{_signature(name, found)}{_text(found)}"


def _signature(name: str, found: Any) -> str:
    parameters = [each for each in inspect.signature(found).parameters.values() if each.name != "self"]
    shown = str(inspect.Signature([each.replace(annotation=_plain(each.annotation)) for each in parameters]))
    shown = f"{name}{shown}"
    if len(shown) > 100:
        shown = re.sub(r", (?=[*\w]+[:,=)]|\*)", ",\n    ", shown).replace("(", "(\n    ", 1)
    return f"```python\n{shown}\n```\n\n"


class _Written(str):
    """An annotation as it stands in the code: ``inspect`` would put quotes around it."""

    def __repr__(self) -> str:
        return str(self)


def _plain(annotation: Any) -> Any:
    annotation = getattr(annotation, "__forward_arg__", annotation)
    return _Written(annotation) if isinstance(annotation, str) else annotation


def _text(found: Any) -> str:
    """A docstring as Markdown."""
    text = inspect.getdoc(found) or ""
    text = re.sub(r":(?:class|meth|mod|func|data):`~?\.?([^`]+)`", r"`\1`", text).replace("``", "`")
    text = re.sub(r"^:param ([^:]+):", r"- `\1`:", text, flags=re.MULTILINE)
    text = re.sub(r"^:raises ([^:]+):", r"- raises `\1`:", text, flags=re.MULTILINE)
    text = re.sub(r"\bdocs/(\w+\.md)", lambda page: f"[{_title(page[1])}]({page[1]})", text)
    return f"{text}\n\n"


def _title(page: str) -> str:
    """By which it is linked: its heading, up to a comma or a colon."""
    heading = (PAGE.parent / page).read_text().partition("\n")[0]
    return re.split("[,:]", heading.removeprefix("# "))[0]


def _errors() -> str:
    head, tree = _text(errors).strip().split("\n\n    ", 1)
    return f"## Errors: `refill.errors`\n\n{head}\n\n```\n{textwrap.dedent('    ' + tree)}\n```\n\n"


def _http() -> str:
    described = client_app(CacheNode(Settings())).openapi()
    rows = [
        f"| `{method.upper()}` | `{path}` | {answer['summary']} |"
        for path, methods in described["paths"].items()
        for method, answer in methods.items()
    ]
    return (
        "## HTTP: the clients' port\n\nWhat a training process and `refill` commands ask of a pod. Every pod describes "
        "these routes at `/docs`. Errors are JSON objects of `error`, `message` and `details`, with the status of "
        "their kind. `refill.protocol.wire_format` describes binary bodies.\n\n"
        "| | path | |\n| --- | --- | --- |\n" + "\n".join(rows) + "\n"
    )


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
