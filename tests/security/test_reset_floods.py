"""HTTP/2 requests that the server for other pods resets for a fault: they are over at once, so any number may follow.
Whoever goes on with them is not let in, what is held stays within the promise, and pods that are there go on."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hpack
import httpx
import pytest
import trustme
from hyperframe.frame import HeadersFrame, RstStreamFrame, SettingsFrame, WindowUpdateFrame
from tests.waiting import until

from refill_service.demo.local_cluster import LocalCluster
from refill_service.settings import load_settings

TOKEN = "pods-0123456789abcdef"
MEMORY_BYTES = 16 << 20
STRANGERS = 8
"""Each makes one connection after another."""
REQUESTS, AT_ONCE = 1_000, 50
"""Of a connection, which ends when more were reset, and may have 128 at once."""
MOST = 2**31 - 1
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SettingsFrame(0).serialize()
RESET = RstStreamFrame(1).serialize()
CONNECT_SECONDS = 3


def reset_requests() -> list[bytes]:
    """In pieces, for a connection. Each allows the server to send more than there can be: it has to reset it."""
    fields = [(":method", "GET"), (":path", "/peer/v1/alive"), (":scheme", "http"), (":authority", "pod")]
    encoder = hpack.Encoder()
    pieces = list[bytes]()
    for first in range(0, REQUESTS, AT_ONCE):
        streams = [2 * number + 1 for number in range(first, first + AT_ONCE)]
        heads = [HeadersFrame(stream, encoder.encode(fields), flags=["END_HEADERS"]) for stream in streams]
        frames = [each for head in heads for each in (head, WindowUpdateFrame(head.stream_id, MOST))]
        pieces.append(b"".join(frame.serialize() for frame in frames))
    return pieces


class Secured:
    """A pod, with its certificates if there are any.

    :param tls: for who connects, with a certificate of the pods' authority.
    """

    def __init__(self, cluster: LocalCluster, tls: ssl.SSLContext | None) -> None:
        self.cluster, self.tls = cluster, tls

    def connected(self) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.cluster.peer_ports[0]), CONNECT_SECONDS)
        return connection if self.tls is None else self.tls.wrap_socket(connection, server_hostname="127.0.0.1")

    def peak_bytes(self) -> int:
        """Of its resident set."""
        lines = Path(f"/proc/{self.cluster.processes[0].pid}/status").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("VmHWM"))) << 10

    def is_let_in(self) -> bool:
        try:
            self.connected().close()
        except TimeoutError:
            return False
        return True


@pytest.fixture(params=["plain", "TLS"])
def pod(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Secured]:
    (tmp_path / "peers").write_text(TOKEN)
    settings: dict[str, str | int | float] = {"memory_bytes": MEMORY_BYTES, "peer_token": str(tmp_path / "peers")}
    tls = None
    if request.param == "TLS":
        authority = trustme.CA()
        certificate = authority.issue_cert("127.0.0.1", common_name="refill")
        files = {f"peer_tls_{name}": tmp_path / f"{name}.pem" for name in ("cert", "key", "ca")}
        certificate.cert_chain_pems[0].write_to_path(str(files["peer_tls_cert"]))
        certificate.private_key_pem.write_to_path(str(files["peer_tls_key"]))
        authority.cert_pem.write_to_path(str(files["peer_tls_ca"]))
        settings |= {name: str(file) for name, file in files.items()}
        tls = ssl.create_default_context(cafile=str(files["peer_tls_ca"]))
        tls.load_cert_chain(str(files["peer_tls_cert"]), str(files["peer_tls_key"]))
        tls.set_alpn_protocols(["h2"])
    with LocalCluster(1, tmp_path, settings) as cluster:
        yield Secured(cluster, tls)
        assert cluster.processes[0].poll() is None
        assert "Traceback" not in cluster.log(0)


@pytest.mark.slow_attack
def test_who_floods_with_requests_that_are_reset_is_shut_out_and_pods_go_on(pod: Secured) -> None:
    cluster, flood, is_over = pod.cluster, reset_requests(), threading.Event()
    promised = load_settings(memory_bytes=MEMORY_BYTES).promised_bytes
    url = f"{'http' if pod.tls is None else 'https'}://127.0.0.1:{cluster.peer_ports[0]}/peer/v1/alive"
    shown = {"authorization": f"Bearer {TOKEN}", "refill-pods": "1"}

    def floods() -> None:
        while not is_over.is_set():
            with contextlib.suppress(OSError), pod.connected() as connection:
                connection.sendall(PREFACE)
                for piece in flood:
                    connection.sendall(piece)
                    came = 0
                    while came < len(RESET) * AT_ONCE and (more := len(connection.recv(1 << 16))):
                        came += more

    with httpx.Client(http1=False, http2=True, verify=pod.tls or False, headers=shown, timeout=60) as neighbour:
        assert neighbour.get(url).status_code == 200
        with ThreadPoolExecutor(STRANGERS) as strangers, contextlib.ExitStack() as stack:
            stack.callback(is_over.set)
            for _ in range(STRANGERS):
                strangers.submit(floods)
            until(lambda: pod.peak_bytes() > promised or "127.0.0.1 floods port" in cluster.log(0), "the end of it")
            assert not pod.is_let_in()
            assert neighbour.get(url).status_code == 200, "on its connection, which was there before"
    assert pod.peak_bytes() < promised
    until(pod.is_let_in, "it is let in again")
