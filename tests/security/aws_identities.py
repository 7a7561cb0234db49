"""What gives AWS credentials to a pod? The services that boto3 asks, on loopback, with secrets that tests look for.

STS (roles, web identities), the credentials endpoint of a container, and the metadata of a machine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import parse_qs

__all__ = ["AwsIdentities", "aws_identities"]

_EXPIRES = "2099-01-01T00:00:00Z"
_ROLE = "/latest/meta-data/iam/security-credentials/"


@dataclass
class AwsIdentities:
    url: str
    secrets: dict[str, str] = field(default_factory=dict)
    """What no log may hold, by where it was used: given out by these services, or shown to them."""
    refuses: bool = False
    """Whether STS gives nobody a role any more."""
    signed_by: set[str] = field(default_factory=set)
    """The key ids that asked STS for a role."""

    def profiles(self, folder: Path) -> tuple[int, dict[str, str]]:
        """How many profiles there are, ``pod-0`` and so on, one for each way to get credentials, and the environment
        in which they work."""
        self.secrets |= {"web identity": "web-identity-token-0123456789", "file": "secret-of-the-file-0123456789"}
        self.secrets |= {"file's session": "session-of-the-file-0123456789", "process": "secret-of-a-process-0123"}
        (folder / "web-identity").write_text(self.secrets["web identity"])
        given = {"Version": 1, "AccessKeyId": "AKIAPROCESS", "SecretAccessKey": self.secrets["process"]}
        (folder / "given.json").write_text(json.dumps(given))
        role = "role_arn = arn:aws:iam::123456789012:role/refill\nregion = us-east-1\n"
        config = f"""
[profile pod-0]
aws_access_key_id = AKIAFILE
aws_secret_access_key = {self.secrets["file"]}
aws_session_token = {self.secrets["file's session"]}
[profile pod-1]
{role}web_identity_token_file = {folder / "web-identity"}
[profile pod-2]
{role}credential_source = EcsContainer
[profile pod-3]
{role}credential_source = Ec2InstanceMetadata
[profile pod-4]
credential_process = cat {folder / "given.json"}
[profile pod-5]
{role}credential_source = Environment
"""
        (folder / "config").write_text(config)
        self.secrets["container's authorization"] = "authorization-of-the-container-0123"
        self.secrets |= {
            "environment": "secret-of-the-environment-0123",
            "its session": "session-of-the-environment-01",
        }
        environment = {
            "AWS_ACCESS_KEY_ID": "AKIAENVIRONMENT",
            "AWS_SECRET_ACCESS_KEY": self.secrets["environment"],
            "AWS_SESSION_TOKEN": self.secrets["its session"],
            "AWS_CONFIG_FILE": str(folder / "config"),
            "AWS_SHARED_CREDENTIALS_FILE": str(folder / "none"),
            "AWS_ENDPOINT_URL_STS": self.url,
            "AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{self.url}/container",
            "AWS_CONTAINER_AUTHORIZATION_TOKEN": self.secrets["container's authorization"],
            "AWS_EC2_METADATA_SERVICE_ENDPOINT": self.url,
            "AWS_EC2_METADATA_DISABLED": "false",
        }
        return 6, environment


@contextmanager
def aws_identities() -> Iterator[AwsIdentities]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"])).decode()
            action = parse_qs(body)["Action"][0]
            found.signed_by |= set(re.findall(r"Credential=(\w+)/", self.headers.get("authorization", "")))
            found.secrets[f"{action}, shown"] = parse_qs(body).get("WebIdentityToken", [""])[0] or "-" * 20
            if found.refuses:
                code = "<Error><Type>Sender</Type><Code>InvalidIdentityToken</Code><Message>no</Message></Error>"
                self.answer(f"<ErrorResponse>{code}</ErrorResponse>", status=400)
                return
            given = self.credentials(action)
            fields = "".join(f"<{name}>{value}</{name}>" for name, value in given.items())
            self.answer(
                f'<{action}Response xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><{action}Result><Credentials>'
                f"{fields}</Credentials></{action}Result></{action}Response>"
            )

        def do_PUT(self) -> None:
            found.secrets["machine's token"] = "token-of-the-machine-0123456789"
            self.answer(found.secrets["machine's token"])

        def do_GET(self) -> None:
            if self.path == _ROLE:
                self.answer("refill")
                return
            source = "container" if self.path == "/container" else "machine"
            given = self.credentials(source)
            self.answer(json.dumps(given | {"Token": given["SessionToken"], "Code": "Success", "Type": "AWS-HMAC"}))

        def credentials(self, whose: str) -> dict[str, str]:
            found.secrets[whose] = f"secret-of-{whose}-0123456789"
            found.secrets[f"{whose}'s session"] = f"session-of-{whose}-0123456789"
            return {
                "AccessKeyId": f"ASIA{whose.upper()}",
                "SecretAccessKey": found.secrets[whose],
                "SessionToken": found.secrets[f"{whose}'s session"],
                "Expiration": _EXPIRES,
            }

        def answer(self, text: str, status: int = 200) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        found = AwsIdentities(f"http://127.0.0.1:{server.server_port}")
        yield found
        server.shutdown()
