"""An HTTP relay in front of the test S3 server that does what that server does not: it checks signatures and
rights, and it misbehaves on order. Run as a process: ``python s3_gate.py UPSTREAM_URL`` prints its own URL.

    python s3_gate.py URL --secret KEY=SECRET --read-only KEY=SECRET --fail-first 2 --stall

Signatures are computed by botocore from the request as it came, as S3 does it.
"""

from __future__ import annotations

import argparse
import http.client
import re
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, urlsplit

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

_AUTHORIZATION = re.compile(r"Credential=([^/]+)/\d+/([^/]+)/s3/aws4_request, ?SignedHeaders=([^,]+), ?Signature=(\w+)")


class Gate(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    upstream: str
    secrets: dict[str, str]
    read_only: set[str]
    fail_first: int
    cut_first: int
    stall: bool
    delay_seconds: float
    without: str = ""
    """A header that neither the server nor who asks it gets to see."""

    def handle_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if self.refused():
            return self._refuse(503, "SlowDown", "Please reduce your request rate.")
        if self.secrets and (refused := self._check()):
            return self._refuse(403, *refused)
        connection = http.client.HTTPConnection(self.upstream, timeout=30)
        asked = {name: value for name, value in self.headers.items() if name.lower() != self.without}
        connection.request(self.command, self.path, body, asked)
        answer = connection.getresponse()
        data = answer.read()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "content-length", self.without):
                self.send_header(name, value)
        length = answer.getheader("content-length") if self.command == "HEAD" else str(len(data))
        self.send_header("content-length", length or "0")
        self.end_headers()
        if self.command == "GET":
            given = self.given(data)
            self.close_connection = self.close_connection or len(given) < len(data)
            data = given
        if self.command != "HEAD":
            self.wfile.write(data)

    def refused(self) -> bool:
        """Whether this request is told to come again later; waits first, if it is to be slow."""
        if self.stall:
            time.sleep(30)
        time.sleep(self.delay_seconds)
        type(self).fail_first -= 1
        return self.fail_first >= 0

    def given(self, data: bytes) -> bytes:
        """What is sent of an answer's body; less of it ends the connection."""
        if len(data) > 1:
            type(self).cut_first -= 1
        return data[: len(data) // 2] if self.cut_first >= 0 and len(data) > 1 else data

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = handle_any  # noqa: N815

    def _check(self) -> tuple[str, str] | None:
        found = _AUTHORIZATION.search(self.headers.get("authorization") or "")
        if found is None:
            return "AccessDenied", "Access Denied"
        key, region, signed, signature = found.groups()
        if key not in self.secrets:
            return "InvalidAccessKeyId", "The AWS Access Key Id you provided does not exist in our records."
        parts = urlsplit(self.path)
        request = AWSRequest(
            method=self.command,
            url=f"http://{self.headers['host']}{parts.path}",
            params=dict(parse_qsl(parts.query, keep_blank_values=True)),
            headers={name: self.headers[name] for name in signed.split(";") if name != "host"},
        )
        request.context["timestamp"] = self.headers["x-amz-date"]
        signer = S3SigV4Auth(Credentials(key, self.secrets[key]), "s3", region)
        if signer.signature(signer.string_to_sign(request, signer.canonical_request(request)), request) != signature:
            return "SignatureDoesNotMatch", "The request signature we calculated does not match the signature you gave."
        if key in self.read_only and self.command not in ("GET", "HEAD"):
            return "AccessDenied", f"User {key} is not authorized to perform: s3:{self.command.title()}Object"
        return None

    def _refuse(self, status: int, code: str, message: str) -> None:
        text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>"
        body = b"" if self.command == "HEAD" else text.encode()
        self.send_response(status)
        self.send_header("content-type", "application/xml")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def gate_of(arguments: list[str]) -> ThreadingHTTPServer:
    """One that is not served yet."""
    parser = argparse.ArgumentParser()
    parser.add_argument("upstream")
    parser.add_argument("--secret", action="append", default=[])
    parser.add_argument("--read-only", action="append", default=[])
    parser.add_argument("--fail-first", type=int, default=0)
    parser.add_argument("--cut-first", type=int, default=0)
    parser.add_argument("--stall", action="store_true")
    parser.add_argument("--without", default="")
    parser.add_argument("--delay-seconds", type=float, default=0.0)
    given = parser.parse_args(arguments)

    class Made(Gate):
        upstream = urlsplit(given.upstream).netloc
        fail_first, cut_first = given.fail_first, given.cut_first
        stall, delay_seconds, without = given.stall, given.delay_seconds, given.without.lower()

    Made.secrets = dict(item.split("=", 1) for item in given.secret + given.read_only)
    Made.read_only = {item.split("=", 1)[0] for item in given.read_only}
    server = ThreadingHTTPServer(("127.0.0.1", 0), Made)
    server.daemon_threads = True
    return server


def main() -> None:
    server = gate_of(sys.argv[1:])
    print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
