"""How is a rank run, killed and started again? As a process of its own, that ends with whoever started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from tests.chaos.rank import RankPlan

__all__ = ["RankProcess"]

_ROOT = Path(__file__).parents[2]


class RankProcess:
    """Its errors go to ``FILE.log``.

    :param program: one that takes the same plan; empty: the rank's.
    """

    def __init__(self, plan: RankPlan, program: str = "") -> None:
        self.plan = plan
        self._program = program or ("planned_rank" if plan.spec["policy"] == "planned" else "rank")
        self._process = self._start()

    @property
    def done(self) -> bool:
        """Whether it has all its epochs, and the last one twice."""
        return Path(f"{self.plan.file}.done").exists()

    @property
    def has_received(self) -> bool:
        """Whether the process that runs now has, and so is the rank."""
        return self._written_bytes() > self._written_before

    @property
    def failure(self) -> str | None:
        """Why it ended though nobody ended it."""
        if self._process.poll() is None:
            return None
        lines = Path(f"{self.plan.file}.log").read_text(errors="replace").strip().splitlines()
        return "\n".join(lines[-20:]) or f"ended with status {self._process.returncode}"

    def kill(self) -> None:
        """At once, as a crash does."""
        self._process.kill()
        self._process.wait()

    def forget(self) -> None:
        """It has written down nothing, and begins anew."""
        for what in ("", ".state", ".begun", ".done"):
            Path(f"{self.plan.file}{what}").unlink(missing_ok=True)

    def restart(self, home: str, service: str = "") -> None:
        """Another process, which goes on from what this one had written down."""
        Path(f"{self.plan.file}.done").unlink(missing_ok=True)
        self.plan = replace(self.plan, home=home, service=service or self.plan.service)
        self._process = self._start()

    def pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self.resume()
        try:
            self._process.wait(5)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            self.kill()

    def _written_bytes(self) -> int:
        path = Path(self.plan.file)
        return path.stat().st_size if path.exists() else 0

    def _start(self) -> subprocess.Popen[bytes]:
        self._written_before = self._written_bytes()
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(_ROOT), *sys.path])}
        if self.plan.tmp:
            Path(self.plan.tmp).mkdir(exist_ok=True)
            environment |= {"TMPDIR": self.plan.tmp}
        with Path(f"{self.plan.file}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", f"tests.chaos.{self._program}", self.plan.to_json()],
                cwd=_ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Ctrl-C reaches the driver alone, which then stops its ranks.
                start_new_session=True,
            )
