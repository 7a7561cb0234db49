"""Writes the reference from the code: ``python docs/api_reference.py``. A test compares.

docs/API.md, docs/SETTINGS.md, docs/COMMANDS.md, docs/FORMATS.md, and the table of alerts in docs/MONITORING.md.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import inspect
import io
import os
import re
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

import refill
from refill import errors
from refill.formats.decoders import STANDARD
from refill.job_samples import JobSamples
from refill.protocol.job_spec import JobSpec
from refill.protocol.policies import POLICIES
from refill_service import cli
from refill_service.formats import FORMAT_NAMES
from refill_service.object_store.store_settings import USUAL_NAMES, StoreSettings
from refill_service.pod.cache_node import CacheNode
from refill_service.serving.app import client_app
from refill_service.serving.metrics import families
from refill_service.settings import Settings

PAGE = Path(__file__).with_name("API.md")
SETTINGS_PAGE = Path(__file__).with_name("SETTINGS.md")
COMMANDS_PAGE = Path(__file__).with_name("COMMANDS.md")
FORMATS_PAGE = Path(__file__).with_name("FORMATS.md")
MONITORING_PAGE = Path(__file__).with_name("MONITORING.md")
_HEAD = """# API reference

Every class, function, error and route of refill. [The PyTorch client](CLIENT.md) shows how they are used together, and
[Settings and metrics](SETTINGS.md) lists what can be set. `python docs/api_reference.py` writes this page from the
code.

"""
_SETTINGS_HEAD = """# Settings and metrics

Every setting of a pod, of the object store and of a job, and every metric of a pod. `python docs/api_reference.py`
writes this page from the code.

"""
_COMMANDS_HEAD = """# Commands

What every `refill` command says of itself with `--help`. `python docs/api_reference.py` writes this page from the code.

"""
_FORMATS_HEAD = """# Formats

Every format that [`refill index`](DATASETS.md#refill-index) makes a dataset of, in the order in which they are looked
for: how samples are found, what their fields are, what is refused. `python docs/api_reference.py` writes this page from
the code.

"""
_ALERTS = (
    "<!-- made by `python docs/api_reference.py`: begin -->",
    "<!-- made by `python docs/api_reference.py`: end -->",
)
_RULES = Path(__file__).parents[1] / "dashboards" / "rules.yaml"
_WHEN = re.compile(r"((?:^ +# .*\n)+) +- alert: (\w+)$", re.MULTILINE)
_ARGUMENTS = {"name", "dataset", "world_size", "seed", "shuffle", "drop_last", "order", "holder"}
"""Fields of a job that ``CacheDataset`` takes by another name or documents itself, or that pods fill in."""


def page() -> str:
    return _HEAD + "".join([_python(), _decoders(), _errors(), _http()])


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
    return f"{_linked(text)}\n\n"


def _linked(text: str) -> str:
    return re.sub(r"\bdocs/(\w+\.md)", lambda page: f"[{_title(page[1])}]({page[1]})", text)


def _title(page: str) -> str:
    """By which it is linked: its heading, up to a comma or a colon."""
    heading = (PAGE.parent / page).read_text().partition("\n")[0]
    return re.split("[,:]", heading.removeprefix("# "))[0]


def _decoders() -> str:
    extensions: dict[Any, list[str]] = {}
    for extension, decoder in STANDARD.items():
        extensions.setdefault(decoder, []).append(f"`{extension}`")
    rows = [f"| {' '.join(of)} | {_first_paragraph(decoder)} |\n" for decoder, of in extensions.items()]
    return (
        "## Decoders: `decode=True`\n\nWhat members become by their extension; others stay bytes. Of `seg.png`, "
        "`seg.png` comes before `png`. Pictures are recognised by their content.\n\n"
        f"| extension | becomes |\n| --- | --- |\n{''.join(rows)}\n"
    )


def _first_paragraph(found: Any) -> str:
    return " ".join(_text(found).partition("\n\n")[0].split())


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


def settings_page() -> str:
    return _SETTINGS_HEAD + "\n".join([_of_pods(), _of_the_store(), _of_jobs(), _of_policies(), _metrics()])


def _of_pods() -> str:
    rows = [
        f"| `{name}` | {_default(field.default)} | {field.description} |"
        for name, field in Settings.model_fields.items()
    ]
    return (
        "## Settings of a pod\n\nEach is an option of `refill serve` (`--memory-bytes 4GiB`), a variable "
        "(`REFILL_MEMORY_BYTES=4GiB`); most are values of the chart, below `settings`. An "
        "option wins over a variable. A pod does not start with a variable that is misspelt, and names it. "
        "[The pod](POD.md) explains memory and limits, [Security](SECURITY.md) tokens and TLS.\n\n"
        "| setting | default | |\n| --- | --- | --- |\n" + "\n".join(rows) + "\n"
    )


def _of_the_store() -> str:
    said = _said_below(StoreSettings)
    rows = [
        f"| `{each.name}` | {_default(each.default)} | {_quoted(USUAL_NAMES.get(each.name, ()))} | {said[each.name]} |"
        for each in dataclasses.fields(StoreSettings)
    ]
    return (
        "## Settings of the object store\n\nEach is a variable `REFILL_STORE_*` (`REFILL_STORE_REGION`) and a value of "
        "the chart, below `store`. Commands have options for four: `--endpoint-url`, `--region`, `--profile` and "
        "`--no-sign-request` (`anonymous`). An option wins, then refill's variable, then AWS's. A folder (`file://`) "
        "uses only `max_connections`. [The object store](STORE.md) says what they are for.\n\n"
        "| setting | default | variables of AWS | |\n| --- | --- | --- | --- |\n" + "\n".join(rows) + "\n"
    )


def _of_jobs() -> str:
    said = _said_below(JobSpec)
    defaults = dataclasses.asdict(JobSpec("job", "file:///x"))
    rows = [f"| `{name}` | `{defaults[name]}` | {said[name]} |" for name in defaults if name not in _ARGUMENTS]
    return (
        "## Settings of a job\n\nFurther arguments of `refill.CacheDataset`. All ranks of a job give the same ones. "
        "[Which order to choose](ORDERS.md) helps with `policy`.\n\n"
        "| setting | default | |\n| --- | --- | --- |\n" + "\n".join(rows) + "\n"
    )


def _of_policies() -> str:
    rows = [
        f"| `{policy}` | `{setting.name}` | `{setting.default or repr(setting.default)}` | {setting.about} |"
        for policy, terms in POLICIES.items()
        for setting in terms.settings
    ]
    return (
        "## Settings of a policy\n\nThey go into `policy_settings`: "
        '`CacheDataset(..., policy="exact", policy_settings={"eviction": "never"})`. `refill simulate` takes them as '
        "`--set eviction=never`.\n\n"
        "| policy | setting | default | |\n| --- | --- | --- | --- |\n" + "\n".join(rows) + "\n"
    )


def _metrics() -> str:
    rows = []
    for family in families(CacheNode(Settings())):
        if family.name.startswith("refill_"):
            name = family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")
            found: Iterable[str] = getattr(family, "_labelnames", ())
            if family.type == "histogram":
                found = ("operation",)
            elif family.type == "info":
                found = family.samples[0].labels
            rows.append(f"| `{name}` | {_quoted(found)} | {family.documentation} |")
    return (
        "## Metrics\n\n`GET /metrics` of a pod has these. Counts are of one pod: sum a job's over its pods. The label "
        "of a job is `training_job`, because Prometheus puts a label `job` on everything that it scrapes. A *take* is "
        "an answered request, whose sample leaves memory; a *miss* is a take that waited for the store; a *refill* is "
        "a chunk that is read into *slots*, places for samples in memory. [Monitoring](MONITORING.md) has dashboards "
        "and alerts.\n\n| metric | labels | |\n| --- | --- | --- |\n" + "\n".join(rows) + "\n"
    )


def commands_page() -> str:
    return _COMMANDS_HEAD + "\n".join(
        f"## refill {name}\n\n```text\n{_help(name)}\n```\n"
        for name in re.findall(r"^    (\w+)  ", _help(), re.MULTILINE)
    )


def _help(*command: str) -> str:
    """Without the usage, which says the same in short. Of an option with two names, Python 3.13 repeats no metavar."""
    said, os.environ["COLUMNS"] = io.StringIO(), "110"
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        cli.main([*command, "--help"])
    text = said.getvalue().partition("\n\n")[2].strip()
    return re.sub(r"(--[\w-]+) (\S+), (--[\w-]+) \2(?=\s)", r"\1, \3 \2", text)


def formats_page() -> str:
    folder = Path(inspect.getfile(cli)).with_name("formats")
    said = {name: ast.get_docstring(ast.parse((folder / f"{name}.py").read_text())) for name in FORMAT_NAMES}
    return _FORMATS_HEAD + "\n".join(f"## {name}\n\n{(text or '').replace('``', '`')}\n" for name, text in said.items())


def monitoring_page() -> str:
    """As it is, with the table of alerts anew: each rule, and the comment above it, which says when it fires."""
    before, _, rest = MONITORING_PAGE.read_text().partition(_ALERTS[0])
    return f"{before}{_ALERTS[0]}\n\n{_alerts()}\n{_ALERTS[1]}{rest.partition(_ALERTS[1])[2]}"


def _alerts() -> str:
    groups, text = yaml.safe_load(_RULES.read_text())["groups"], _RULES.read_text()
    when = {name: " ".join(said.replace("#", " ").split()) for said, name in _WHEN.findall(text)}
    names = [rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule]
    return "| alert | when |\n| --- | --- |\n" + "".join(f"| `{name}` | {when[name]} |\n" for name in names)


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _default(value: Any) -> str:
    if value is None or value == "" or value == ():
        return "none"
    return f"`{value}`"


def _said_below(kind: type) -> dict[str, str]:
    """What stands below each field of a class, in its source, as one line."""
    return dict(_docstrings(ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]))


def _docstrings(node: Any) -> Iterator[tuple[str, str]]:
    name = ""
    for each in node.body:
        if name and isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant):
            yield name, _linked(" ".join(str(each.value.value).replace("``", "`").split()))
        name = each.target.id if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) else ""


def pages() -> dict[Path, str]:
    return {
        PAGE: page(),
        SETTINGS_PAGE: settings_page(),
        COMMANDS_PAGE: commands_page(),
        FORMATS_PAGE: formats_page(),
        MONITORING_PAGE: monitoring_page(),
    }


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
        print(f"wrote {path}")
