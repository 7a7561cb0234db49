"""Which service does a command of people ask, and how does it show who asks? For ``receipt``, ``jobs`` and ``top``."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from refill.errors import InvalidInput, PodUnreachable, error_from_wire
from refill.pods.credentials import CA_FILE_VARIABLE, TOKEN_FILE_VARIABLE, URL_VARIABLE, Credentials
from refill.pods.pod_failures import OTHER_PORT
from refill.pods.token_hosts import TOKEN_HOSTS_VARIABLE
from refill.protocol.job_spec import is_job_name

_DEFAULT_URL = "http://127.0.0.1:8000"
_TLS_VARIABLE = "REFILL_TLS_CERT"
"""Set where a pod serves by TLS, so also for a command that is started in it."""


def add_service_arguments(parser: argparse.ArgumentParser, name: str, **options: Any) -> None:
    """:param name: of the argument for the URL: ``--url`` or ``url``."""
    parser.add_argument(
        name,
        default=os.environ.get(URL_VARIABLE) or _url_of_this_pod() or _DEFAULT_URL,
        help=f"URL of the service or of any pod (default: {URL_VARIABLE}; in a pod's container that pod's; else "
        f"{_DEFAULT_URL})",
        **options,
    )
    parser.add_argument(
        "--token-file", metavar="FILE", help=f"file that holds your token (default: {TOKEN_FILE_VARIABLE})"
    )
    parser.add_argument(
        "--ca-file",
        metavar="FILE",
        help=f"file with the certificates to trust (default: {CA_FILE_VARIABLE}; in a pod with TLS, ca.crt beside its "
        "certificate)",
    )


def job_name(text: str) -> str:
    """Of an option, for argparse."""
    if not is_job_name(text):
        raise argparse.ArgumentTypeError(
            f"{text!r:.150} is no name of a job: those have 1 to 128 letters, digits, '.', '_' or '-', first a letter "
            "or digit; refill jobs lists them"
        )
    return text


def client_of(args: argparse.Namespace, timeout_seconds: float) -> httpx.Client:
    """Shows the token of the arguments to every pod. Raises :class:`refill.errors.InvalidInput` for a wrong file, or a
    URL with a port that there is not: httpx takes its lower 16 bits."""
    try:
        _ = urlsplit(args.url).port
    except ValueError as error:
        raise InvalidInput(f"{args.url!r} is not the URL of a service, like http://refill:8000: {error}") from error
    credentials = Credentials(args.token_file, args.ca_file or _ca_file_of_this_pod())

    def show_token(request: httpx.Request) -> None:
        if not credentials.may_be_shown(str(request.url), args.url):
            raise InvalidInput(
                f"{args.url} names a pod at {request.url.host}, which is of another domain: the token is not sent "
                f"there unless {TOKEN_HOSTS_VARIABLE} lists that host or its domain"
            )
        request.headers.update(credentials.headers())

    return httpx.Client(
        timeout=timeout_seconds,
        trust_env=False,
        verify=credentials.ssl_context() if args.url.startswith("https:") else False,
        event_hooks={"request": [show_token]},
    )


def _url_of_this_pod() -> str | None:
    """Of the pod in which the command runs. Its certificate names it so, and not 127.0.0.1."""
    if _TLS_VARIABLE not in os.environ:
        host, port = os.environ.get("REFILL_HOST", ""), os.environ.get("REFILL_PORT", "")
        if not host and not port.isdecimal():  # Kubernetes sets such a variable, too, for a service of that name
            return None
        host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        return f"http://{f'[{host}]' if ':' in host else host}:{port if port.isdecimal() else 8000}"
    from refill_service.settings import load_settings

    settings = load_settings()
    return settings.pod_urls[settings.ordinal] if settings.pod_urls else f"https://127.0.0.1:{settings.port}"


def _ca_file_of_this_pod() -> str | None:
    """As Kubernetes' Secrets of certificates have it, unless the environment names another."""
    if CA_FILE_VARIABLE in os.environ or _TLS_VARIABLE not in os.environ:
        return None
    beside = Path(os.environ[_TLS_VARIABLE]).with_name("ca.crt")
    return str(beside) if beside.exists() else None


def ask(client: httpx.Client, method: str, url: str, path: str, body: Any = None) -> Any:
    """The JSON that a pod answers with. Raises :class:`InvalidInput` for what is no URL, :class:`PodUnreachable`, and
    what the pod says is wrong."""
    try:
        answer = client.request(method, f"{url.rstrip('/')}{path}", json=body)
        content = answer.json()
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise InvalidInput(f"--url {url!r} is not the URL of a service, like http://refill:8000") from error
    except httpx.HTTPError as error:
        why = str(error) or type(error).__name__
        if isinstance(error, (httpx.RemoteProtocolError, httpx.ReadError)):
            why += f": {OTHER_PORT}"
        if "WRONG_VERSION_NUMBER" in why:
            why = "it speaks no TLS there: write http://"
        raise PodUnreachable(f"{url} does not answer: {why}", url=url) from error
    except ValueError as error:
        if answer.status_code < 500:
            raise InvalidInput(f"{url} answers, but is not a pod of refill") from error
        content = answer.text  # of what stands before the pods
    if answer.status_code != 200:
        raise error_from_wire(content, status=answer.status_code, source=url)
    return content
