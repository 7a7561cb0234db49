"""`pip install refill-cache` alone: a command that needs more says which extra, in one line."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
OF_SERVICE = {re.split(r"[<>=!~\[]", needed)[0].replace("-", "_") for needed in EXTRAS["service"]}
OF_SERVICE |= {"botocore", "starlette", "pydantic", "opentelemetry"} - {"opentelemetry_api"}

WITHOUT = f"""
import sys
class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {sorted(OF_SERVICE)}:
            raise ModuleNotFoundError("No module named " + name, name=name)
sys.meta_path.insert(0, NotInstalled())
from refill_service.cli import main
"""
ONE = WITHOUT + "sys.exit(main())\n"
EACH = (
    WITHOUT
    + """
for line in sys.argv[1:]:
    print(main(line.split()), file=sys.stderr)
"""
)
COMMANDS = [
    "pack {} {}/out",
    "index {}",
    "inspect {}",
    "serve",
    "serve --pods 3",
    "top",
    "jobs",
    "end run-1",
    "warm run-1",
    "receipt run-1 0",
    "simulate --samples 10000",
    "analyze --samples 1000 --sample-bytes 1000 --chunk-memory 1MB",
    "demo",
]


def test_each_command_names_the_extra_that_it_needs(tmp_path: Path) -> None:
    lines = [command.replace("{}", str(tmp_path)) for command in COMMANDS]
    ran = subprocess.run([sys.executable, "-c", EACH, *lines], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    said = ran.stderr.splitlines()
    assert len(said) == 2 * len(COMMANDS), ran.stderr
    for command, what, status in zip(COMMANDS, said[::2], said[1::2], strict=True):
        needs = r"refill: [\w.]+ is not installed; the command needs: pip install 'refill-cache\[service\]'"
        assert re.fullmatch(needs, what), f"{command}: {what}"
        assert status == "2", command


def test_packing_from_python_names_the_extra_that_it_needs(tmp_path: Path) -> None:
    script = WITHOUT.partition("from refill_service.cli")[0] + (
        "import refill\n"
        "try:\n"
        f"    refill.pack([{{'jpg': b''}}], {tmp_path.as_uri()!r})\n"
        "except ModuleNotFoundError as error:\n"
        "    print(error)\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert re.fullmatch(r"refill\.pack needs \w+: pip install 'refill-cache\[service\]'\n", ran.stdout), ran


def test_help_lists_all_commands() -> None:
    ran = subprocess.run([sys.executable, "-c", ONE, "--help"], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert all(command in ran.stdout for command in ("pack", "serve", "receipt", "demo"))
