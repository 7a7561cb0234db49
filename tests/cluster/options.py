"""What did the user say of the cluster, that no test can know?"""

from __future__ import annotations

import shlex
import subprocess
import tempfile
from typing import NamedTuple

from tests.cluster.cluster import Failed

__all__ = ["Options", "run_command"]

_LONGEST_SECONDS = 1800


class Options(NamedTuple):
    """Commands; empty: not given."""

    cut_node: str = ""
    """Cuts a node's power; the node's name is put after it."""
    stop_pod: str = ""
    """Lets the processes of a pod stand still; the pod's name is put after it."""
    dns: tuple[str, str] = ("", "")
    """Takes the cluster's DNS away, and brings it back."""
    api: tuple[str, str] = ("", "")
    """The same for the API server."""
    rotate: str = ""
    """Replaces the tokens and certificates of the release, and ends when all is done."""


def run_command(command: str, *more: str) -> None:
    """One of the user's."""
    with tempfile.TemporaryFile("w+") as said:  # not a pipe: what it leaves running may hold that
        try:
            arguments = [*shlex.split(command), *more]
            done = subprocess.run(
                arguments,
                stdout=said,
                stderr=subprocess.STDOUT,
                timeout=_LONGEST_SECONDS,
                check=False,
                start_new_session=True,  # Ctrl-C is for who runs this
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Failed(f"{command}: {error}") from None
        if done.returncode:
            said.seek(0)
            raise Failed(f"{command} ended with {done.returncode}: {said.read().strip()[-300:]}")
