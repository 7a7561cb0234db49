"""Where are a pod's certificate and private key, and have they been replaced? cert-manager renews them in place."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from refill.errors import InvalidInput

State = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Certificates:
    """Files of PEM. Raises :class:`InvalidInput` when they can't be used.

    :param ca: of those who may show themselves with a certificate, and must; None: nobody has to.
    """

    cert: Path
    key: Path
    ca: Path | None = None

    def __post_init__(self) -> None:
        self.context()

    def context(self) -> ssl.SSLContext:
        """For a server."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.cert, self.key)
        except (OSError, ssl.SSLError) as error:
            raise InvalidInput(f"no certificate with its key, as PEM: {self.cert} and {self.key}: {error}") from error
        if self.ca is not None:
            try:
                context.load_verify_locations(self.ca)
            except (OSError, ssl.SSLError) as error:
                raise InvalidInput(f"no certificates to trust, as PEM, in {self.ca}: {error}") from error
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def state(self) -> State:
        """Another one than before: they were replaced. Raises OSError while they are."""
        found = (path.stat() for path in (self.cert, self.key, self.ca) if path is not None)
        return tuple((each.st_ino, each.st_mtime_ns, each.st_size) for each in found)
