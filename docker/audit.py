"""Does a package in the image have a known vulnerability? ``make audit``, a part of ``make check``.

    python docker/audit.py [LOCK] [options of pip-audit]

Asks the advisory service of the package index about every version in docker/requirements.lock;
``--vulnerability-service osv`` asks another one. Status 1 if something was found. A service that can't be reached, or
that knows nothing of the packages, as the mirror of an index may, is one line and status 0: a build without network
goes on, and says that it was not audited.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["main", "verdict"]

LOCK = Path(__file__).parent / "requirements.lock"
_NOT_REACHED = ("ConnectionError", "ConnectTimeout", "ReadTimeout", "Timeout", "NameResolutionError", "HTTPError")


def main(arguments: list[str]) -> int:
    lock = Path(arguments.pop(0)) if arguments and not arguments[0].startswith("-") else LOCK
    asking = [sys.executable, "-m", "pip_audit", "--requirement", str(lock), "--require-hashes", "--disable-pip"]
    done = subprocess.run(
        [*asking, "--format", "json", "--progress-spinner", "off", *arguments], capture_output=True, text=True
    )
    said = done.stderr.strip().splitlines() or [f"pip-audit ended with {done.returncode}"]
    if done.stdout.lstrip().startswith("{"):
        lines, status = verdict(json.loads(done.stdout))
    elif any(name in done.stderr for name in _NOT_REACHED):
        lines, status = [f"not audited: the advisory service can't be reached ({said[-1][:120]})"], 0
    else:
        lines, status = [f"not audited: {said[-1][:300]}"], 1
    for line in lines:
        print(f"audit: {line}")
    return status


def verdict(report: dict[str, Any]) -> tuple[list[str], int]:
    """What to say of pip-audit's JSON report, and the exit status."""
    packages = report["dependencies"]
    unknown = [each["name"] for each in packages if "skip_reason" in each]
    found = [
        f"{each['name']} {each['version']}: {known['id']}, fixed in {', '.join(known['fix_versions']) or 'no version'}"
        for each in packages
        for known in each.get("vulns", [])
    ]
    if len(unknown) == len(packages):
        return [f"not audited: the advisory service knows none of the {len(packages)} packages"], 0
    lines = [*found, f"{len(packages) - len(unknown)} packages asked about, {len(found)} vulnerabilities known"]
    if unknown:
        lines.append(f"not known to the advisory service: {', '.join(unknown)}")
    return lines, 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
