"""README and docs agree with the code: commands parse, settings and metrics are the ones that exist."""

from __future__ import annotations

import dataclasses
import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from tests.end_to_end.doc_pages import words

from refill.protocol.job_spec import JobSpec
from refill_service.cli import _COMMANDS, _parser
from refill_service.demo.local_cluster import LocalCluster
from refill_service.object_store.store_settings import StoreSettings
from refill_service.settings import Settings

ROOT = Path(__file__).parents[2]
MOST_WORDS = 35_000
"""They have 34,244; the rest is for what is being written. Who needs more says what the pages lose, or raises it."""
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands_in(text: str) -> list[str]:
    """Every ``refill ...`` line of a code block, its variables and comments left out."""
    found = []
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        if language not in ("", "sh", "bash", "console"):
            continue
        for line in block.replace("\\\n", " ").splitlines():
            line = re.sub(r"\s+#.*", "", line.removeprefix("$ "))
            if match := re.match(r"^(?:\w+=(?:'[^']*'|\S*)\s+)*refill (.+)$", line):
                found.append(match[1])
    return found


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_commands_in_the_docs_parse(path: Path) -> None:
    for command in commands_in(path.read_text()):
        words = shlex.split(command)
        try:
            _parser(words).parse_args(words)
        except SystemExit:
            pytest.fail(f"{path.name} shows a command that does not parse: refill {command}")


def test_readme_shows_the_commands() -> None:
    shown = {command.split()[0] for command in commands_in((ROOT / "README.md").read_text())}
    assert shown >= {"pack", "index", "inspect", "serve", "simulate"}


def test_readmes_python_lines_use_names_that_exist() -> None:
    import refill

    for path in DOCS:
        for name in re.findall(r"\brefill\.([A-Z]\w+|timed)\b", path.read_text()):
            assert hasattr(refill, name), f"{path.name} names refill.{name}"


def rows_below(heading: str) -> str:
    """The section of the page of settings and metrics that has this heading."""
    return (ROOT / "docs" / "SETTINGS.md").read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def test_settings_in_the_docs() -> None:
    documented = dict(re.findall(r"^\| `(\w+)` \| (\S+) \| \S", rows_below("Settings of a pod"), re.MULTILINE))
    documented = {name: default.strip("`") for name, default in documented.items()}
    defaults = {n: "none" if f.default in ((), "") else str(f.default) for n, f in Settings.model_fields.items()}
    assert documented == defaults


def test_job_settings_in_the_docs() -> None:
    """Those that are no argument of CacheDataset by name, nor filled in by pods."""
    documented = dict(re.findall(r"^\| `(\w+)` \| `(\S+)` \| \S", rows_below("Settings of a job"), re.MULTILINE))
    by_name = {"name", "dataset", "world_size", "seed", "shuffle", "drop_last", "order", "holder"}
    defaults = dataclasses.asdict(JobSpec("job", "file:///x"))
    fields = {name: str(default) for name, default in defaults.items() if name not in by_name}
    assert documented == fields


def test_metrics_in_the_docs(three_pods: LocalCluster) -> None:
    documented = set(re.findall(r"^\| `(refill_\w+)` \|.*\| \S.* \|$", rows_below("Metrics"), re.MULTILINE))
    text = httpx.get(f"{three_pods.pod_urls[0]}/metrics").text
    kinds = dict(re.findall(r"^# TYPE (refill_\w+) (\w+)", text, re.MULTILINE))
    exported = {name for name in kinds if not name.endswith("_created")}
    assert documented == exported


def test_links_lead_somewhere() -> None:
    for path in [*DOCS, ROOT / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
            if target != "docs/CLIENT.md":
                assert (path.parent / target).exists(), f"{path.name} links to {target}"


def test_one_person_can_read_all_pages() -> None:
    """In an afternoon: without those that are made of the code, of trainers and of examples."""
    generated = {"API.md", "SETTINGS.md", "COMMANDS.md", "FORMATS.md", "PAPERS.md", "FIGURES.md"}
    pages = [path for folder in (ROOT, ROOT / "docs", ROOT / "docs" / "decisions") for path in folder.glob("*.md")]
    counts = {str(path.relative_to(ROOT)): words(path) for path in pages if path.name not in generated}
    assert sum(counts.values()) < MOST_WORDS, sorted(counts.items(), key=lambda each: -each[1])


def test_no_code_names_a_host_that_it_would_report_to() -> None:
    """docs/QUESTIONS.md says that there is no telemetry: what is asked is what somebody named, and the Hub."""
    named: set[str] = set()
    for folder in ("client/refill", "service/refill_service"):
        for path in (ROOT / folder).rglob("*.py"):
            named |= set(re.findall(r"https?://((?:[\w-]+\.)+[a-z]{2,})\b", path.read_text()))
    invented = {host for host in named if host.startswith(("refill", "localhost")) or host.endswith("example.com")}
    of_docs = {"github.com", "ACCOUNT.blob.core.windows.net"}
    assert named - invented - of_docs == {"huggingface.co"}


def test_help_of_every_command() -> None:
    """Each is found in the one module that is imported for it."""
    for command in _COMMANDS:
        with pytest.raises(SystemExit) as ended:
            _parser([command]).parse_args([command, "--help"])
        assert ended.value.code == 0


def test_settings_of_the_store_in_the_docs() -> None:
    documented = re.findall(r"^\| `(\w+)` \|.*\| \S.* \|$", rows_below("Settings of the object store"), re.MULTILINE)
    assert documented == [field.name for field in dataclasses.fields(StoreSettings)]


def test_generated_pages_are_what_the_code_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs")
    made = importlib.import_module("api_reference")
    for path, text in made.pages().items():
        assert path.read_text() == text, "run: python docs/api_reference.py"


def test_help_lists_every_command() -> None:
    listed = re.findall(r"^    (\w+)  ", _parser([]).format_help(), re.MULTILINE)
    assert listed == list(_COMMANDS)


def test_help_imports_no_command_and_nothing_that_one_needs() -> None:
    """It is asked for first, and answers at once."""
    code = (
        "import sys; before = set(sys.modules)\n"
        "from refill_service.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: print(*set(sys.modules) - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = done.stdout.splitlines()[-1].split()
    ours = {name for name in imported if name.partition(".")[0] in ("refill", "refill_service")}
    assert ours == {"refill", "refill.errors", "refill_service", "refill_service.cli"}
    assert {name.partition(".")[0] for name in imported} - set(sys.stdlib_module_names) <= {"refill", "refill_service"}
    assert len(imported) < 60, sorted(imported)


def test_a_pod_does_not_import_what_other_commands_need() -> None:
    others = "refill_service.planning.simulated_job refill_service.commands.top refill_service.commands.demo httpx"
    code = (
        "import sys; from refill_service.cli import _parser; _parser(['serve'])\n"
        f"print([name for name in {others.split()} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
