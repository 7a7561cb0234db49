"""What `make dist` makes: does it install into an empty environment, and work there with what it asks for?"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from email.parser import BytesParser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import refill

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CHART = f"refill-{PROJECT['version']}.tgz"
UV = Path(sysconfig.get_path("scripts")) / "uv"


def run(*command: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([str(part) for part in command], cwd=ROOT, capture_output=True, text=True, timeout=120)
    if check and done.returncode:
        pytest.fail(f"{command[0]} ended with {done.returncode}:\n{done.stdout}{done.stderr}"[-3000:])
    return done


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `make dist` writes, written by its own commands; an old wheel and a chart were there before."""
    folder = tmp_path_factory.mktemp("dist")
    for name in ("refill_cache-0.0.1-py3-none-any.whl", CHART):
        (folder / name).touch()
    recipe = re.search(r"^dist: .*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe
    scripts = sysconfig.get_path("scripts")
    for line in recipe[1].replace("$(BIN)", scripts).splitlines():
        run("sh", "-c", re.sub(r"\bdist\b", str(folder), line.strip()))
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    return dist / f"refill_cache-{PROJECT['version']}-py3-none-any.whl"


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel alone and what it needs."""
    folder = tmp_path_factory.mktemp("bare")
    run(UV, "venv", "--quiet", "--python", sys.executable, "--no-project", folder)
    run(UV, "pip", "install", "--quiet", "--python", folder, wheel)
    return folder / "bin"


def test_both_files_are_there_and_say_who_and_what(dist: Path, wheel: Path) -> None:
    sources = dist / f"refill_cache-{PROJECT['version']}.tar.gz"
    assert sorted(file for file in dist.iterdir() if file.suffix in (".whl", ".gz")) == [wheel, sources]
    assert (dist / CHART).exists(), "made by `make chart`"
    with zipfile.ZipFile(wheel) as opened:
        says = BytesParser().parsebytes(opened.read(f"refill_cache-{PROJECT['version']}.dist-info/METADATA"))
    assert (says["Name"], says["Version"]) == ("refill-cache", refill.__version__)
    assert says["Author"] == "The refill authors"
    assert says["License-Expression"] == "Apache-2.0"
    assert "Typing :: Typed" in says.get_all("Classifier", [])
    extras = {"torch", "service", "plot", "tracing", "tfrecord", "arrayrecord", "parquet", "huggingface", "dev"}
    assert set(says.get_all("Provides-Extra", [])) == extras
    asked = [Requirement(line) for line in says.get_all("Requires-Dist", [])]
    assert {each.name for each in asked if each.marker is None} == {"numpy"}
    assert not [each for each in asked if each.name == "refill"], "that is somebody else's"


def test_the_wheel_has_the_two_packages_and_their_types(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        names = opened.namelist()
    top = {name.split("/")[0] for name in names}
    assert top == {"refill", "refill_service", f"refill_cache-{PROJECT['version']}.dist-info"}
    assert {"refill/py.typed", "refill_service/py.typed"} <= set(names)
    here = {
        path.relative_to(root).as_posix() for root in (ROOT / "client", ROOT / "service") for path in root.rglob("*.py")
    }
    assert {name for name in names if name.endswith(".py")} == here


def test_the_sources_bring_docs_and_chart_along(dist: Path) -> None:
    with tarfile.open(dist / f"refill_cache-{PROJECT['version']}.tar.gz") as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    assert {"README.md", "LICENSE", "CHANGELOG.md", "Makefile", "docs/INSTALL.md", "docker/Dockerfile"} <= names
    assert {"helm/refill/Chart.yaml", "tests/conftest.py", "dashboards/rules.yaml"} <= names
    assert not [name for name in names if "__pycache__" in name or name.startswith((".git/", ".venv"))]


def test_it_is_imported_without_torch(bare: Path) -> None:
    code = "import sys, refill, refill.pods.pod_connection; print(refill.__version__, 'torch' in sys.modules)"
    assert run(bare / "python", "-c", code).stdout == f"{PROJECT['version']} False\n"


def test_where_torch_is_missing_a_name_that_needs_it_says_so(bare: Path) -> None:
    done = run(bare / "python", "-c", "import refill; refill.CacheDataset", check=False)
    assert done.stderr.splitlines()[-1] == (
        "ModuleNotFoundError: refill.CacheDataset needs PyTorch: pip install 'refill-cache[torch]'"
    )


def test_the_command_helps_without_the_service(bare: Path) -> None:
    helped = run(bare / "refill", "--help").stdout
    assert re.search(r"^    serve +needs: pip install 'refill-cache\[service\]'$", helped, re.MULTILINE)
    said = run(bare / "refill", "--version").stdout
    assert re.fullmatch(rf"refill {PROJECT['version']} \(commit [0-9a-f]{{12}}(-dirty)?\)\n", said), said
    assert not (ROOT / "client/refill/commit.txt").exists(), "the working tree would go on to call itself that commit"
    for command in (["serve"], ["jobs"], ["top", "http://127.0.0.1:1"]):
        done = run(bare / "refill", *command, check=False)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert done.stderr.endswith("the command needs: pip install 'refill-cache[service]'\n")


def test_with_the_service_every_command_is_there(wheel: Path, tmp_path: Path) -> None:
    """The wheel alone in a new environment, and the packages of this one behind it."""
    run(UV, "venv", "--quiet", "--python", sys.executable, "--no-project", tmp_path)
    (packages,) = tmp_path.glob("lib/python*/site-packages")
    (packages / "behind.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    run(UV, "pip", "install", "--quiet", "--no-deps", "--python", tmp_path, wheel)
    helped = run(tmp_path / "bin" / "refill", "--help").stdout
    assert "needs: pip" not in helped
    assert re.search(r"^    pack  ", helped, re.MULTILINE)
    assert "usage: refill serve" in run(tmp_path / "bin" / "refill", "serve", "--help").stdout


def test_an_extra_is_added_with_nothing_published(bare: Path) -> None:
    """What our errors advise: pip finds refill-cache installed, and asks the index for what the extra names only."""
    pip = [sys.executable, "-m", "pip", "--python", bare / "python", "install", "--no-index"]
    done = run(*pip, "refill-cache[torch]", check=False)
    assert "Requirement already satisfied: refill-cache[torch] in " in done.stdout
    assert re.search(r"^ERROR: No matching distribution found for (torch|pillow)", done.stderr, re.MULTILINE)


def test_every_place_names_the_distribution_that_is_ours() -> None:
    """Whoever follows `pip install refill` gets a stranger's code."""
    tracked = run("git", "ls-files", check=False).stdout.split() or ["README.md"]
    for name in tracked:
        path = ROOT / name
        is_text = path.suffix not in (".svg", ".json", ".lock") and not {"golden", "corpus"} & {*path.parts}
        if path == Path(__file__) or not is_text or not path.is_file():
            continue
        for line in path.read_text().splitlines():
            assert not re.search(r"\brefill\[|pip3? install [^`]*['\" ]refill['\" ]*(?:$|[#`)])", line), (
                f"{name}: {line}"
            )


def test_the_readme_installs_the_wheel_that_is_made(wheel: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    assert set(re.findall(r"dist/(refill_cache\S*?\.whl)", readme)) == {wheel.name}
    wanted = set(re.findall(r"\.whl\[(\w+)\]|refill-cache\[(\w+)\]", readme))
    assert {one or other for one, other in wanted} <= set(PROJECT["optional-dependencies"])
