"""What the docs name exists: settings, variables, options, files, commands, routes, panels, alerts, values."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.end_to_end.doc_pages import PAGES, ROOT, blocks, commands, prose, sources, spans
from tests.helm.rendering import CHART, release_as_given, values_in

from refill.pods.credentials import VARIABLES
from refill_service.cli import _COMMANDS, _parser
from refill_service.object_store.store_settings import StoreSettings
from refill_service.pod.cache_node import CacheNode
from refill_service.serving.app import client_app
from refill_service.settings import Settings, load_settings

FOREIGN = {
    "SQLITE_TMPDIR",
    "OTEL_TRACES_SAMPLER_ARG",
    "protected_hardlinks",
    *("AZURE_CLIENT_SECRET", "AZURE_ENCRYPTION_KEY", "objectUser", "objectViewer"),
    "img_5",
    *("--nnodes", "NODE_RANK", "JOB_UID"),
    *("on_train_epoch_start", "overfit_batches", "use_distributed_sampler", "val_check_interval"),
    *("ddp_spawn", "notebook_launcher"),
    *("process_count", "to_picture"),
    *("--dataloader-type", "--dataloader-save", "is_distributed"),
    *("accelerator_config", "eval_dataset", "group_by_length", "ignore_data_skip", "pixel_values"),
    "train_sampling_strategy",
    *("decode_jpeg", "external_source"),
    *("ContainerCreating", "WaitForFirstConsumer", "allowVolumeExpansion", "volumeBindingMode"),
    "--build-arg",
    *("NotReady", "NoExecute", "preemptionPolicy"),
    *("ImagePullBackOff", "ErrImagePull", "CrashLoopBackOff"),
    *("ContainerCreating", "CreateContainerConfigError", "FailedMount", "PersistentVolumeClaims"),
    *("GetObject", "ListBucket", "PutObject", "DeleteObject", "AbortMultipartUpload", "AbortIncompleteMultipartUpload"),
}
"""Names of other people that occur in no file here."""

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@each_page
def test_names_in_backticks_occur_in_the_code(page: Path) -> None:
    """Those that are somebody's for sure: with an underscore, or a capital within."""
    named = {word for span in spans(page) for word in re.findall(r"[A-Za-z_]\w+", span)}
    ours = {word for word in named if re.search(r"\w_\w|[a-z][A-Z]", word) and not word.lower().startswith("refill_")}
    unknown = ours - FOREIGN - _words()
    assert not unknown, f"{page.name} names {sorted(unknown)}, which no code does; FOREIGN is for names of others"


@cache
def _words() -> set[str]:
    return set(re.findall(r"\w+", sources()))


@each_page
def test_variables_exist(page: Path) -> None:
    known = {f"REFILL_{name.upper()}" for name in Settings.model_fields}
    known |= {f"REFILL_STORE_{field.name.upper()}" for field in dataclasses.fields(StoreSettings)}
    known |= {*VARIABLES}
    assert set(re.findall(r"\bREFILL_\w*[A-Z](?![\w<*])", page.read_text())) <= known


@each_page
def test_targets_of_make_exist(page: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    shown = {found[1] for command in commands(page) if (found := re.match(r"make ([\w-]+)", command))}
    assert shown <= targets


@each_page
def test_files_exist(page: Path) -> None:
    top = r"(?:benchmarks|client|dashboards|docker|docs|examples|helm|service|tests|refill_service|\./helm)"
    for path in re.findall(rf"(?<![\w/.-])({top}/[\w./*-]*\w)", page.read_text()):
        places = (ROOT, ROOT / "service", page.parent)
        assert any(list(place.glob(path.removeprefix("./"))) for place in places), f"{page.name} names {path}"


@each_page
def test_links_have_titles(page: Path) -> None:
    assert not re.findall(r"\[[\w/]+\.md\]\(", page.read_text()), "a link says what it leads to, not in which file"


@each_page
def test_links_within_pages_lead_to_headings(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text()):
        other = page.parent / target if target else page
        headings = re.findall(r"^#+ (.+)$", _without_blocks(other), re.MULTILINE)
        slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert anchor in slugs, f"{page.name} links to {target}#{anchor}"


def _without_blocks(page: Path) -> str:
    assert page.exists(), page
    return prose(page)


@each_page
def test_commands_have_the_options_that_are_shown(page: Path) -> None:
    """Of `refill` wherever it stands, in a sentence, too; and of whatever else is said to have ``--an-option``."""
    everything = sources()
    for command in commands(page):
        command = re.sub(r"^(?:\w+=(?:'[^']*'|\S*)\s+)+", "", command)
        if found := re.match(r"refill (\w+)(.*)", command):
            if found[1] in _COMMANDS:
                known = _options(found[1])
                assert set(re.findall(r"(?<!\S)(--[\w-]+)", found[2])) <= known, f"{page.name}: {command}"
        elif re.match(r"--[a-z]", command):
            option = re.match(r"--[\w-]+", command)[0]  # type: ignore[index]
            known_anywhere = {each for name in _COMMANDS for each in _options(name)}
            known_anywhere |= FOREIGN
            assert option in known_anywhere or f'"{option}"' in everything, f"{page.name}: {command}"


@cache
def _options(command: str) -> set[str]:
    (subparsers,) = (
        action for action in _parser([command])._actions if action.dest == "==SUPPRESS==" or action.choices
    )
    parser = subparsers.choices[command]  # type: ignore[index, union-attr, call-overload]
    return {option for action in parser._actions for option in action.option_strings}


@each_page
def test_routes_exist(page: Path) -> None:
    for span in spans(page):
        if found := re.match(
            r"(?:(?:GET|PUT|POST|DELETE) )?(?:http://[\w.]+:?\w*)?(/(?:v1|metrics|healthz|readyz)[^ ?]*)", span
        ):
            assert any(route.match(found[1]) for route in _routes()), f"{page.name} names the route {span}"


@cache
def _routes() -> list[re.Pattern[str]]:
    app = client_app(CacheNode(load_settings(host="127.0.0.1", ordinal=0, memory_bytes=1 << 24)))
    return [re.compile(re.sub(r"\{\w+\}", r"[^/]+", path) + r"$") for path in app.openapi()["paths"]]


@each_page
def test_tests_that_are_named_exist(page: Path) -> None:
    named = {word for span in spans(page) for word in re.findall(r"\btest_\w+", span)}
    assert named <= _tests(), f"{page.name} names {sorted(named - _tests())}, and there are no such tests"


@cache
def _tests() -> set[str]:
    files = list((ROOT / "tests").rglob("test_*.py"))
    return {path.stem for path in files}.union(*(re.findall(r"def (test_\w+)", path.read_text()) for path in files))


def test_each_loss_is_tried() -> None:
    """Each row of the table of what is survived names tests."""
    text = (ROOT / "docs" / "CORRECTNESS.md").read_text()
    table = text[text.index("| what is lost |") :].partition("\n\n")[0].splitlines()[2:]
    assert table
    for row in table:
        *cells, tests = (cell.strip() for cell in row.strip("|").split(" | "))
        assert len(cells) == 3, row
        assert all(cells), f"a cell is empty: {row}"
        assert re.findall(r"`test_\w+`", tests), f"no test is named: {row}"


def test_panels_of_the_runbook_exist() -> None:
    titles = set()
    for path in (ROOT / "dashboards").glob("*.json"):
        panels = json.loads(path.read_text())["panels"]
        titles |= {panel["title"] for row in panels for panel in (row, *row.get("panels", []))}
    named = re.findall(r"(?<!\*)\*([A-Z][^*]+)\*(?!\*)", (ROOT / "docs" / "RUNBOOK.md").read_text())
    assert named
    assert {" ".join(name.split()) for name in named} <= titles


def test_alerts_of_the_monitoring_page_exist() -> None:
    groups = yaml.safe_load((ROOT / "dashboards" / "rules.yaml").read_text())["groups"]
    alerts = {rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule}
    assert set(re.findall(r"^\| `(Refill\w+)`", (ROOT / "docs" / "MONITORING.md").read_text(), re.MULTILINE)) == alerts


def test_lines_of_the_troubleshooting_page_are_said() -> None:
    """Of each line in its tables, the parts between what stands for something else."""
    said = re.sub(r'"\s*\n\s*f?"', "", sources())
    page = (ROOT / "docs" / "TROUBLESHOOTING.md").read_text()
    for line in re.findall(r"^\| `([^`]+)`", page, re.MULTILINE):
        for part in re.split(r"\.\.\.|\b[A-Z]+\b|\b\d+ s\b|^[A-Z]\w+: ", line):
            if len(part.split()) > 1 and part.strip() not in ("certificate verify failed", "Connection refused"):
                assert part.strip(" :;,") in said, f"nothing says {part!r}"


@each_page
def test_the_chart_takes_what_is_shown(page: Path) -> None:
    """``helm install`` as it stands, and every block of values."""
    for command in commands(page):
        if re.match(r"helm (install|upgrade) \w+ \S*helm/refill", command):
            release_as_given(_values_of(command))
    for text in blocks(page, "yaml"):
        shown = next(yaml.safe_load_all(text))
        if set(shown) <= set(values_in(CHART / "values.yaml")):
            release_as_given({"insecure": "access" not in shown} | shown)


def _values_of(command: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if {"--reuse-values", "--reset-then-reuse-values", "my-values.yaml"} & set(command.split()):
        values["insecure"] = True
    words = shlex.split(re.sub(r"\$\([^)]*\)", "x", command))
    for option, word in itertools.pairwise(words):
        if option in ("-f", "--values") and (ROOT / word).exists():
            values |= values_in(ROOT / word)
        if option == "--set":
            name, _, value = word.partition("=")
            *above, last = name.split(".")
            place = values
            for part in above:
                place = place.setdefault(part, {})
            place[last] = yaml.safe_load(value)
    return values


@each_page
def test_values_of_the_chart_exist(page: Path) -> None:
    """Such as ``pinnedDisk.persistent``; of ``settings`` and ``store``, refill's own. ``dataset`` is Python's, too."""
    values = values_in(CHART / "values.yaml")
    values["settings"] |= dict.fromkeys(Settings.model_fields)
    values["store"] |= {field.name: None for field in dataclasses.fields(StoreSettings)}
    for span in spans(page):
        if re.fullmatch(r"(?!dataset\.)[a-z]\w+(\.\w+)+(: .*|=.*)?", span) and span.split(".")[0] in values:
            place: Any = values
            for name in re.split(r"[:=]", span)[0].split("."):
                assert name in place, f"{page.name} names the value {span}"
                place = place[name]


def test_a_core_moves_the_same_everywhere() -> None:
    places = [ROOT / "docs" / "INSTALL.md", ROOT / "docs" / "TROUBLESHOOTING.md", CHART / "values.yaml"]
    figures = {path.name: re.findall(r"core\s+moves\s+about\s+([\d.]+) GB/s", path.read_text()) for path in places}
    assert len({figure for found in figures.values() for figure in found}) == 1, figures
    assert all(figures.values()), figures


def test_the_version_is_the_same_everywhere() -> None:
    import refill

    chart = values_in(CHART / "Chart.yaml")
    assert chart["appVersion"] == refill.__version__
    for page in PAGES:
        assert set(re.findall(r"\brefill:(\d+\.\d+\.\d+)\b", page.read_text())) <= {refill.__version__}, page.name
