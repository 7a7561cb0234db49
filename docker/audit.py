"""Does a package in the image have a known vulnerability? ``make audit``, a part of ``make check``.

    python docker/audit.py [LOCK] [--allow-offline] [options of pip-audit]

Asks the advisory service of the package index about every version in docker/requirements.lock;
``--vulnerability-service osv`` asks another one. Status 1 if something was found, and if nothing was audited: the
service can't be reached, or knows none of the packages, as the mirror of an index may. ``--allow-offline`` makes that
one line and status 0, for a build without network, which then says that it was not audited.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["main", "verdict"]

LOCK = Path(__file__).parent / "requirements.lock"
_ALLOW_OFFLINE = "--allow-offline"
_NOT_REACHED = ("ConnectionError", "ConnectTimeout", "ReadTimeout", "Timeout", "NameResolutionError", "HTTPError")


def main(arguments: list[str]) -> int:
    unaudited = 0 if _ALLOW_OFFLINE in arguments else 1
    arguments = [each for each in arguments if each != _ALLOW_OFFLINE]
    lock = Path(arguments.pop(0)) if arguments and not arguments[0].startswith("-") else LOCK
    asking = [sys.executable, "-m", "pip_audit", "--requirement", str(lock), "--require-hashes", "--disable-pip"]
    done = subprocess.run(
        [*asking, "--format", "json", "--progress-spinner", "off", *arguments], capture_output=True, text=True
    )
    said = done.stderr.strip().splitlines() or [f"pip-audit ended with {done.returncode}"]
    if done.stdout.lstrip().startswith("{"):
        lines, status = verdict(json.loads(done.stdout), unaudited)
    elif any(name in done.stderr for name in _NOT_REACHED):
        lines, status = [f"not audited: the advisory service can't be reached ({said[-1][:120]})"], unaudited
    else:
        lines, status = [f"not audited: {said[-1][:300]}"], 1
    for line in lines:
        print(f"audit: {line}")
    if unaudited and lines[0].startswith("not audited: the advisory"):
        print(f"audit: {_ALLOW_OFFLINE} lets that pass")
    return status


def verdict(report: dict[str, Any], unaudited: int = 1) -> tuple[list[str], int]:
    """What to say of pip-audit's JSON report, and the exit status: ``unaudited`` where it tells of nothing."""
    packages = report["dependencies"]
    unknown = [each["name"] for each in packages if "skip_reason" in each]
    found = [
        f"{each['name']} {each['version']}: {known['id']}, fixed in {', '.join(known['fix_versions']) or 'no version'}"
        for each in packages
        for known in each.get("vulns", [])
    ]
    if len(unknown) == len(packages):
        return [f"not audited: the advisory service knows none of the {len(packages)} packages"], unaudited
    lines = [*found, f"{len(packages) - len(unknown)} packages asked about, {len(found)} vulnerabilities known"]
    if unknown:
        lines.append(f"not known to the advisory service: {', '.join(unknown)}")
    return lines, 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
