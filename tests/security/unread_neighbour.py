"""Who asks as a pod does, by HTTP/2, and reads no answer: neither what the system holds for it, nor what it allows."""

from __future__ import annotations

import socket
from types import TracebackType

import h2.config
import h2.connection
import h2.events
import h2.settings

__all__ = ["UnreadNeighbour"]

_MOST = 2**31 - 1


class UnreadNeighbour:
    """One connection. A context manager.

    :param token: None: a stranger.
    :param window_bytes: of each answer, so much may be sent before any of it was taken; None: without end.
    """

    def __init__(self, port: int, token: str | None, window_bytes: int | None) -> None:
        self._authority = f"127.0.0.1:{port}"
        self._token = token
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)  # the system makes it a few kilobytes
        self._socket.connect(("127.0.0.1", port))
        self._http = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        self._http.local_settings[h2.settings.SettingCodes.INITIAL_WINDOW_SIZE] = (
            _MOST if window_bytes is None else window_bytes
        )
        self._http.local_settings.acknowledge()
        self._http.initiate_connection()
        if window_bytes is None:
            self._http.increment_flow_control_window(_MOST - 65_535)
        self._send()
        self._until_settings_came()

    def __enter__(self) -> UnreadNeighbour:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def ask(self, method: str, path: str, body: bytes = b"", *, more: bool = False, json: bool = False) -> None:
        """:param more: the body does not end."""
        headers = [(":method", method), (":path", path), (":scheme", "http"), (":authority", self._authority)]
        headers += [("refill-pods", "1")]
        if self._token is not None:
            headers.append(("authorization", f"Bearer {self._token}"))
        if json:
            headers.append(("content-type", "application/json"))
        stream = self._http.get_next_available_stream_id()
        self._http.send_headers(stream, headers, end_stream=not body and not more)
        self._send()
        while body:
            size_bytes = min(
                self._http.local_flow_control_window(stream), self._http.max_outbound_frame_size, len(body)
            )
            if size_bytes == 0 and more:
                break
            if size_bytes == 0:
                self._http.receive_data(self._socket.recv(1 << 12))
            else:
                self._http.send_data(stream, body[:size_bytes], end_stream=not more and size_bytes == len(body))
                self._send()
            body = body[size_bytes:]

    def until_answered(self) -> None:
        """Reads until an answer begins."""
        while True:
            events = self._http.receive_data(self._socket.recv(1 << 12))
            if any(isinstance(event, h2.events.ResponseReceived) for event in events):
                return

    @property
    def most_requests(self) -> int:
        """That the pod takes at once."""
        return self._http.remote_settings.max_concurrent_streams

    @property
    def most_body_bytes(self) -> int:
        """Of one request, before it has read any."""
        return self._http.remote_settings.initial_window_size

    def is_over(self) -> bool:
        """The pod has closed the connection."""
        self._socket.setblocking(False)
        try:
            while self._socket.recv(1 << 16):
                pass
        except BlockingIOError:
            return False
        except ConnectionError:
            return True
        return True

    def _send(self) -> None:
        self._socket.sendall(self._http.data_to_send())

    def _until_settings_came(self) -> None:
        while True:
            events = self._http.receive_data(self._socket.recv(1 << 12))
            if any(isinstance(event, h2.events.RemoteSettingsChanged) for event in events):
                self._send()
                return
