"""How does a test run a real Prometheus? One process on loopback that scrapes pods every second."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import yaml
from tests.waiting import until_serving

__all__ = ["PrometheusServer"]


class PrometheusServer:
    """A context manager: answers queries on entry, gone on exit.

    :param program: path of ``prometheus``.
    :param folder: for its configuration, data and log.
    :param rules: rules to evaluate every second.
    :param pod_urls: scraped under the job name ``refill``.
    """

    def __init__(self, program: str, folder: Path, port: int, rules: Path, pod_urls: list[str]) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._program = program
        self._folder = folder
        targets = [url.removeprefix("http://") for url in pod_urls]
        configuration = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(rules)],
            "scrape_configs": [{"job_name": "refill", "static_configs": [{"targets": targets}]}],
        }
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(configuration))

    def __enter__(self) -> PrometheusServer:
        with (self._folder / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    self._program,
                    f"--config.file={self._folder / 'prometheus.yaml'}",
                    f"--storage.tsdb.path={self._folder / 'data'}",
                    f"--web.listen-address={self.url.removeprefix('http://')}",
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def query(self, expr: str) -> list[dict[str, Any]]:
        """The series of an instant query: ``{"metric": labels, "value": [time, text]}`` each."""
        answer = httpx.get(f"{self.url}/api/v1/query", params={"query": expr}, timeout=10).json()
        assert answer["status"] == "success", f"{expr}: {answer.get('error')}"
        series: list[dict[str, Any]] = answer["data"]["result"]
        return series

    def rules(self) -> list[dict[str, Any]]:
        """All rules with their state."""
        groups = httpx.get(f"{self.url}/api/v1/rules", timeout=10).json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def _wait_until_ready(self) -> None:
        log = self._folder / "prometheus.log"
        until_serving(f"{self.url}/-/ready", lambda: self._process.poll() is not None, log.read_text)

    def _stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
