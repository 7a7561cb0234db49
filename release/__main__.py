"""Builds all that a release publishes, from its tag, into one folder, and prints the commands that publish it.

    git tag v0.1.0 && make release                         into build/release-0.1.0
    python -m release --tag v0.1.0 --folder build/release --no-image
    python -m release --chart-key me@example.com --keyring secret.gpg      the chart with a signature for helm verify

What is built is the tag as it lies in the repository, copied elsewhere; the working tree has no part in it. Nothing is
published. In the folder are then the wheel, the source distribution, the chart, the bill of materials, the docs, the
notes of the changelog, the image (where podman is) and SHA256SUMS over all of it.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import tomllib
from pathlib import Path

__all__ = ["Refused", "commands_that_publish", "main", "notes_of", "sign_chart", "what_is_wrong", "with_addresses"]

ROOT = Path(__file__).parents[1]
SCRIPTS = Path(sysconfig.get_path("scripts"))
_PLACEHOLDER = "git.example.com"
_VERSION = re.compile(r"\d+\.\d+\.\d+((a|b|rc)\d+)?")


class Refused(Exception):
    """One line: why there is no release."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m release", description="Build all that a release publishes.")
    parser.add_argument("--tag", help="such as v0.1.0 (default: the one that HEAD has)")
    parser.add_argument("--folder", type=Path, help="where it goes (default: build/release-VERSION); emptied before")
    parser.add_argument("--no-image", action="store_true", help="leave the image out, which podman builds as root")
    parser.add_argument("--python-image", help="base of the image (default: the Dockerfile's)")
    parser.add_argument("--chart-key", help="sign the chart by this key, for helm verify: a .prov beside it")
    parser.add_argument("--keyring", type=Path, help="file of PGP secret keys that has it: gpg --export-secret-keys")
    parser.add_argument("--passphrase-file", type=Path, help="its first line unlocks the key")
    args = parser.parse_args(arguments)
    if args.chart_key and not args.keyring:
        parser.error("--chart-key needs --keyring")
    try:
        return _release(args)
    except Refused as error:
        print(f"release: {error}", file=sys.stderr)
        return 2


def _release(args: argparse.Namespace) -> int:
    tag = args.tag or _git("describe", "--exact-match", "--tags", "HEAD", refused="HEAD has no tag: git tag v0.1.0")
    commit = _git("rev-parse", f"{tag}^{{commit}}", refused=f"there is no tag {tag}")
    with tempfile.TemporaryDirectory(prefix="refill-release-") as folder:
        tree = Path(folder) / "tree"
        archived = subprocess.run(["git", "archive", "--format=tar", commit], cwd=ROOT, capture_output=True, check=True)
        with tarfile.open(fileobj=io.BytesIO(archived.stdout)) as opened:
            opened.extractall(tree, filter="data")
        if wrong := what_is_wrong(tree, tag):
            raise Refused("; ".join(wrong))
        version = tag.removeprefix("v")
        into = (args.folder or ROOT / "build" / f"release-{version}").resolve()
        shutil.rmtree(into, ignore_errors=True)
        into.mkdir(parents=True)
        print(f"{tag} is {commit}", flush=True)
        home = tomllib.loads((tree / "pyproject.toml").read_text())["project"]["urls"]["Source"]
        _build_distribution(tree, into, commit, home, tag)
        _build_chart(tree, into)
        if args.chart_key:
            sign_chart(into / f"refill-{version}.tgz", args.chart_key, args.keyring, args.passphrase_file)
        _build_docs(tree, into, version)
        shutil.copy(tree / "docker" / "sbom.cdx.json", into / f"refill-{version}.sbom.cdx.json")
        notes = notes_of((tree / "CHANGELOG.md").read_text(), version)
        (into / "NOTES.md").write_text(with_addresses(notes, tree, home, tag))
        has_image = not args.no_image and _build_image(tree, into, version, commit, args.python_image)
        _check(into, version)
    files = sorted(path for path in into.iterdir() if path.is_file())
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (into / "SHA256SUMS").write_text("".join(sums))
    for path in [*files, into / "SHA256SUMS"]:
        print(f"  {path.stat().st_size:>12,}  {path.name}")
    if _PLACEHOLDER in home:
        print(f"NOT TO BE PUBLISHED: its metadata name {home}, which is nobody's (CONTRIBUTING.md, A release)")
    print("to publish it:\n")
    print("\n".join(commands_that_publish(version, str(into), has_image)))
    return 0


def what_is_wrong(tree: Path, tag: str) -> list[str]:
    """With a tree that is to be released under that tag; a line for each thing."""
    version = tag.removeprefix("v")
    if not tag.startswith("v") or not _VERSION.fullmatch(version):
        return [f"{tag} is no tag of a release, like v0.1.0"]
    named = {
        "pyproject.toml": r'(?m)^version = "(.*)"',
        "client/refill/__init__.py": r'(?m)^__version__ = "(.*)"',
        "helm/refill/Chart.yaml": r"(?m)^version: (.*)",
        "docker/Dockerfile": r'image\.version="(.*?)"',
        "docker/bake.json": r"/refill:([^\"]+)",
        "CITATION.cff": r"(?m)^version: (.*)",
    }
    wrong = []
    for name, pattern in named.items():
        found = re.search(pattern, (tree / name).read_text())
        if found is None or found[1] != version:
            wrong.append(f"{name} says {found[1] if found else 'no version'}, and the tag {version}")
    changelog = (tree / "CHANGELOG.md").read_text()
    heading = re.search(rf"(?m)^## {re.escape(version)} \((.*)\)$", changelog)
    if heading is None:
        wrong.append(f"CHANGELOG.md has no '## {version} (YYYY-MM-DD)'")
    elif not _is_date(heading[1]):
        wrong.append(f"CHANGELOG.md says {version} ({heading[1]}): put in the day")
    return wrong


def _is_date(text: str) -> bool:
    try:
        return bool(datetime.date.fromisoformat(text))
    except ValueError:
        return False


def notes_of(changelog: str, version: str) -> str:
    """What the changelog says of one version, without its heading."""
    found = re.search(rf"(?ms)^## {re.escape(version)} \([^)\n]*\)\n(.*?)(?=^## |\Z)", changelog)
    assert found, "looked for before"
    return found[1].strip() + "\n"


def with_addresses(markdown: str, tree: Path, home: str, tag: str) -> str:
    """A page that is read elsewhere, as the package index shows the README: its links to files of the tree, and its
    pictures, lead to those of that tag."""

    def address(link: re.Match[str]) -> str:
        if not (tree / link[2].partition("#")[0]).is_file():
            return link[0]
        return f"{link[1]}({home}/{'raw' if link[1].startswith('!') else 'blob'}/{tag}/{link[2]})"

    return re.sub(r"(!\[[^]]*\]|\])\(([^)\s:]+)\)", address, markdown)


def sign_chart(archive: Path, key: str, keyring: Path, passphrase_file: Path | None = None) -> None:
    """Writes a .prov beside it, which ``helm push`` takes along."""
    import helm_python  # large, and of no use to most

    try:
        helm_python.sign(archive, key=key, keyring=keyring, passphrase_file=passphrase_file)
    except helm_python.HelmError as error:
        raise Refused(f"the chart can't be signed by {key}: {error}") from error


def commands_that_publish(version: str, folder: str, has_image: bool = False) -> list[str]:
    """Lines for a shell, in their order. .github/workflows/release.yml does the same."""
    pages = "build/pages"
    image = (
        [
            f"podman load -i {folder}/refill-{version}-image.tar    # built for this machine's platform alone",
            f"podman push refill:{version} docker://$REGISTRY/refill:{version}",
        ]
        if has_image
        else [
            "docker buildx bake -f docker/bake.json --push --provenance=mode=max --sbom=true "
            "--metadata-file build/image.json refill",
            """cosign sign --yes "$REGISTRY/refill@$(jq -r '.refill."containerimage.digest"' build/image.json)\"""",
        ]
    )
    return [
        "# 1. The tag, a registry of images and charts that you are logged in to, and the package index.",
        f"git push origin v{version}",
        "export REGISTRY=ghcr.io/OWNER REVISION=$(git rev-parse HEAD)",
        f"uv publish {folder}/refill_cache-*",
        "# 2. The image, for both platforms where docker buildx is; signed with the identity that cosign asks for.",
        *image,
        "# 3. The chart, and once what Artifact Hub reads.",
        f'helm push {folder}/refill-{version}.tgz "oci://$REGISTRY/charts" 2>&1 | tee build/chart.txt',
        """cosign sign --yes "$REGISTRY/charts/refill@$(sed -n 's/^Digest: //p' build/chart.txt)\"""",
        'oras push "$REGISTRY/charts/refill:artifacthub.io" '
        "--config /dev/null:application/vnd.cncf.artifacthub.config.v1+yaml "
        "helm/artifacthub-repo.yml:application/vnd.cncf.artifacthub.repository-metadata.layer.v1.yaml",
        "# 4. Notes and files beside the tag; docs by version, on a branch gh-pages.",
        f"gh release create v{version} --verify-tag --title v{version} --notes-file {folder}/NOTES.md {folder}/*",
        f"git worktree add {pages} gh-pages",
        f"python3 -m release.pages {folder}/refill-docs-{version}.tar.gz {pages}",
        f"git -C {pages} add -A && git -C {pages} commit -m 'Docs of v{version}' && git -C {pages} push",
    ]


def _build_distribution(tree: Path, into: Path, commit: str, home: str, tag: str) -> None:
    readme = tree / "README.md"
    readme.write_text(with_addresses(readme.read_text(), tree, home, tag))
    (tree / "client" / "refill" / "commit.txt").write_text(f"{commit}\n")
    building = ["build", "--quiet", "--build-constraints", "docker/build.lock", "--require-hashes"]
    _run(SCRIPTS / "uv", *building, "--out-dir", into, ".", cwd=tree)
    (into / ".gitignore").unlink(missing_ok=True)  # uv's own
    _run(SCRIPTS / "twine", "check", "--strict", *into.glob("refill_cache-*"))


def _build_chart(tree: Path, into: Path) -> None:
    code = f"import helm_python; print(helm_python.package('helm/refill', destination={str(into)!r}))"
    _run(sys.executable, "-c", code, cwd=tree)


def _build_docs(tree: Path, into: Path, version: str) -> None:
    """An archive with one folder, named by the version; its pages have a list of versions to choose from."""
    site = tree / "build" / "site" / version
    config = (tree / "mkdocs.yml").read_text()
    chooser = "extra:\n  version: {provider: mike}\n"
    (tree / "mkdocs.yml").write_text(config.replace("extra:\n", chooser, 1))
    _run(SCRIPTS / "mkdocs", "build", "--strict", "--site-dir", site, cwd=tree, NO_MKDOCS_2_WARNING="1")
    with tarfile.open(into / f"refill-docs-{version}.tar.gz", "w:gz") as archive:
        archive.add(site, version)


def _build_image(tree: Path, into: Path, version: str, commit: str, base: str | None) -> bool:
    if shutil.which("podman") is None:
        print("no image: podman is not installed; docker/bake.json builds and pushes it")
        return False
    building = ["build", "--quiet", "--format", "docker", "-f", "docker/Dockerfile", "-t", f"refill:{version}"]
    for given in (f"REVISION={commit}", *([f"PYTHON_IMAGE={base}"] if base else [])):
        building += ["--build-arg", given]
    _run("podman", *building, ".", cwd=tree)
    _run("podman", "save", "--quiet", "-o", into / f"refill-{version}-image.tar", f"refill:{version}")
    return True


def _check(into: Path, version: str) -> None:
    """What has to be there is there, under names that nothing else has."""
    wanted = [f"refill_cache-{version}-py3-none-any.whl", f"refill_cache-{version}.tar.gz", f"refill-{version}.tgz"]
    if missing := [name for name in wanted if not (into / name).exists()]:
        raise Refused(f"{', '.join(missing)} was not built")


def _git(*words: str, refused: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise Refused(refused)
    return done.stdout.strip()


def _run(*words: object, cwd: Path = ROOT, **variables: str) -> None:
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise Refused(f"{Path(str(words[0])).name} {words[1]} ended with {done.returncode}:\n{done.stdout.strip()}")


if __name__ == "__main__":
    sys.exit(main())
