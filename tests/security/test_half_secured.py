"""Half a set-up is refused, not served; what is open is said; and a token that was taken away ends, file by file."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.conftest import free_port
from tests.refill_command import refill_says
from tests.waiting import until

from refill_service.demo.local_cluster import LocalCluster

VISION, SPEECH, PODS = "vision-0123456789abcdef", "speech-0123456789abcdef", "pods-0123456789abcdef"


def refused(settings: dict[str, str]) -> str:
    """What a pod says that does not start."""
    environment = {f"REFILL_{name.upper()}": value for name, value in settings.items()}
    return refill_says("serve", "--port", str(free_port()), environment=environment)


def test_tokens_for_clients_alone_are_refused_where_there_are_peers(tmp_path: Path) -> None:
    """Whoever reached the peers' port could take any sample and end any job, with no token at all."""
    (tmp_path / "tokens").write_text(VISION)
    several = {
        "replicas": "2",
        "ordinal": "0",
        "pod_urls": "http://refill-{ordinal}:8000",
        "peer_urls": "http://refill-{ordinal}:8001",
    }
    said = refused(several | {"client_tokens": str(tmp_path / "tokens")})
    assert "client_tokens is set, and without peer_token or peer_tls_cert whoever reaches peer_port" in said


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalCluster, Path]]:
    """A pod without peers, and the folder with its tokens, a file for each team."""
    folder = tmp_path_factory.mktemp("alone")
    tokens = folder / "tokens"
    tokens.mkdir()
    (tokens / "vision").write_text(VISION)
    (tokens / "speech").write_text(SPEECH)
    settings: dict[str, str | int | float] = {"client_tokens": str(tokens), "token_overlap_seconds": 0}
    with LocalCluster(1, folder, settings | {"memory_bytes": "4MiB"}) as cluster:
        yield cluster, tokens


def test_a_pod_that_is_alone_needs_no_secret_for_peers_and_has_no_port_for_them(
    alone: tuple[LocalCluster, Path],
) -> None:
    (port,) = alone[0].peer_ports
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 5)
    assert "no port for peers" in alone[0].log(0)


def test_its_log_says_what_is_open(alone: tuple[LocalCluster, Path], tmp_path: Path) -> None:
    (line,) = (line for line in alone[0].log(0).splitlines() if "open: " in line)
    assert "tokens and samples come and go in clear" in line
    assert "may register" not in line
    with LocalCluster(2, tmp_path, {"memory_bytes": "4MiB"}) as cluster:
        for pod, url in enumerate(cluster.pod_urls):
            (line,) = (line for line in cluster.log(pod).splitlines() if "open: " in line)
            reached = url.removeprefix("http://")
            assert f"whoever reaches {reached} may register, read and end every job (client_tokens)" in line
            assert f"so may whoever reaches 127.0.0.1:{cluster.peer_ports[pod]} (peer_token, peer_tls_cert)" in line
            assert "every bucket that this pod can read (dataset_urls)" in line
            assert "every folder that this pod can read (dataset_urls)" in line


@pytest.mark.parametrize("what", ["emptied", "damaged", "taken away"])
def test_a_token_ends_when_its_file_has_it_no_more(alone: tuple[LocalCluster, Path], what: str) -> None:
    """Whatever became of that file; others go on, and so does who replaces their token meanwhile."""
    cluster, tokens = alone
    newer = f"newer-{what.replace(' ', '-')}-0123456789abcdef"
    (tokens / "vision").write_text(VISION)
    (tokens / "speech").write_text(SPEECH)
    until(lambda: answer_to(cluster, VISION) == answer_to(cluster, SPEECH) == 200, "an answer to both tokens")
    match what:
        case "emptied":
            (tokens / "vision").write_text("")
        case "damaged":
            (tokens / "vision").write_text("short")
        case "taken away":
            (tokens / "vision").unlink()
    (tokens / "speech").write_text(newer)
    until(lambda: answer_to(cluster, VISION) == 401 and answer_to(cluster, newer) == 200, "the newer token")
    assert answer_to(cluster, SPEECH) == 401
    assert httpx.get(f"{cluster.pod_urls[0]}/readyz").status_code == 200


def test_a_secret_that_was_emptied_lets_nobody_in(alone: tuple[LocalCluster, Path]) -> None:
    cluster, tokens = alone
    (tokens / "vision").write_text(VISION)
    until(lambda: answer_to(cluster, VISION) == 200, "an answer to the token")
    for file in list(tokens.iterdir()):
        file.unlink()
    until(lambda: answer_to(cluster, VISION) == 401, "a refusal of the token")
    assert "holds no token any more" in cluster.log(0)


def answer_to(cluster: LocalCluster, token: str) -> int:
    return httpx.get(f"{cluster.pod_urls[0]}/v1/jobs", headers={"authorization": f"Bearer {token}"}).status_code
