"""Which hosts may be shown the token that a service was given? A pod names all pods, and could name any host.

Those of the service's own domain: the service's host itself, names below it, and names beside it
(``refill.ml.example.org`` and ``node-1.ml.example.org``). In Kubernetes that is its namespace. A service that was named
without a domain, or by an address of this machine, is of the domain that this machine looks names up in. All others
have to be listed, in ``REFILL_TOKEN_HOSTS``. Nobody who was not listed is shown over plain HTTP what an HTTPS service
was given.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

TOKEN_HOSTS_VARIABLE = "REFILL_TOKEN_HOSTS"

_RESOLVER = Path("/etc/resolv.conf")
_SVC = "svc"
_CLUSTER = "cluster.local"
_LONGEST_REGISTRY_LABEL = 3
"""``co.uk`` and ``com.au`` are nobody's own domain."""


def listed_hosts(value: str) -> list[str]:
    """As in ``REFILL_TOKEN_HOSTS``: hosts and domains, separated by commas."""
    return [each.strip().lower().strip(".") for each in value.split(",") if each.strip()]


def searched_domains() -> list[str]:
    """That this machine looks names up in. None where nobody says so."""
    found: list[str] = []
    with suppress(OSError, UnicodeDecodeError):
        for line in _RESOLVER.read_text().splitlines():
            if line.split()[:1] in (["search"], ["domain"]):
                found = [each.lower().strip(".") for each in line.split()[1:]]
    return found


def may_be_shown(url: str, service_url: str, listed: Iterable[str], searched: Sequence[str]) -> bool:
    """Whether a pod at this URL, as a pod of the service has named it, may be shown the service's token."""
    pod, service = urlsplit(url), urlsplit(service_url)
    host, of_service = ((each.hostname or "").removesuffix(".") for each in (pod, service))
    if any(_is_in(host, each) for each in listed):
        return True
    if service.scheme == "https" and pod.scheme != "https":
        return False
    if host == of_service or (_is_loopback(host) and _is_loopback(of_service)):
        return True
    is_local = _is_loopback(of_service)
    if _is_address(host) or (_is_address(of_service) and not is_local):
        return False
    if not is_local and _is_in(host, of_service):
        return True
    if "." not in host:
        return "." not in of_service  # neither has a domain of its own
    return any(_is_in(host, domain) for domain in _domains_of(of_service, searched, is_local=is_local))


def _domains_of(service: str, searched: Sequence[str], *, is_local: bool) -> list[str]:
    """Whose names are beside the service's."""
    if is_local or "." not in service:
        of_namespace = [domain for domain in searched if domain.split(".")[1:2] == [_SVC]]  # not all of the cluster
        return [form for domain in of_namespace or searched for form in _forms(domain)]
    domain = service.partition(".")[2]
    if "." not in domain and any(each.startswith(f"{_SVC}.") for each in searched):
        domain = f"{domain}.{_SVC}"  # NAME.NAMESPACE, as pods of Kubernetes may say
    return _forms(domain)


def _forms(domain: str) -> list[str]:
    """All that names in a domain end in; none for what is no domain of one owner's."""
    labels = domain.split(".")
    if len(labels) >= 2 and labels[1] == _SVC:
        namespace = f"{labels[0]}.{_SVC}"
        return [namespace, f"{namespace}.{_CLUSTER}", domain]
    if len(labels) < 2 or labels[0] == _SVC or domain == _CLUSTER:
        return []
    if len(labels) == 2 and len(labels[0]) <= _LONGEST_REGISTRY_LABEL:
        return []
    return [domain]


def _is_in(host: str, domain: str) -> bool:
    return host == domain or host.endswith(f".{domain}")


def _is_address(host: str) -> bool:
    with suppress(ValueError):
        ipaddress.ip_address(host)
        return True
    return False


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False
