"""What would somebody answer who has got the address of a pod? Whatever they like, to every request, by HTTP/2."""

from __future__ import annotations

import socket
import threading
from dataclasses import dataclass, field
from types import TracebackType

import h2.config
import h2.connection
import h2.events

__all__ = ["HostilePod"]


@dataclass
class HostilePod:
    """Listens on ``port`` of 127.0.0.1. A context manager; what it answers may be set at any time."""

    status: int = 200
    headers: list[tuple[str, str]] = field(default_factory=list)
    body: bytes = b"{}"
    port: int = 0
    paths: list[str] = field(default_factory=list)
    """That were asked for and answered, in their order."""

    def __enter__(self) -> HostilePod:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._connections: list[socket.socket] = []
        threading.Thread(target=self._listen, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # close alone would leave accept() waiting
        self._listener.close()
        for connection in self._connections:
            connection.close()

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._connections.append(connection)
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        http = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False, header_encoding="utf-8"))
        http.initiate_connection()
        asked: dict[int, str] = {}
        try:
            connection.sendall(http.data_to_send())
            while data := connection.recv(1 << 16):
                for event in http.receive_data(data):
                    if isinstance(event, h2.events.RequestReceived):
                        asked[event.stream_id] = dict(event.headers)[":path"]
                    elif isinstance(event, h2.events.StreamEnded):
                        http.send_headers(event.stream_id, [(":status", str(self.status)), *self.headers])
                        http.send_data(event.stream_id, self.body, end_stream=True)
                        self.paths.append(asked.pop(event.stream_id))
                connection.sendall(http.data_to_send())
        except OSError:
            return  # the one who asked is gone
