"""Is the home that somebody has named a pod of the service? A pod of another one would answer, too.

It would be brought the job, and all that the rank had would be reported there: receipts of the service would lack it,
and no word of that would be said.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from refill.errors import AccessError, InvalidInput, PodUnreachable, RefillError, UnknownJob
from refill.pods.answer_checks import checked_pods
from refill.pods.pod_channel import PodChannel, Wait
from refill.pods.token_hosts import TOKEN_HOSTS_VARIABLE

OTHER_DOMAIN = (
    "home pod %s is of another domain than %s, which is asked in its place: the token is not sent there unless "
    f"{TOKEN_HOSTS_VARIABLE} lists that host or its domain"
)

_ANSWER_SECONDS = 5.0
_NAMED = 3


def check_home(channel: PodChannel, home: str, service_url: str, job: str, info: dict[str, Any]) -> None:
    """Raises :class:`InvalidInput` for what is no pod of the service. One that does not answer may be one.

    :param info: what the service says of the job, which it was just told to register.
    """
    pods = checked_pods(info, service_url)
    if home == service_url or home in pods:
        return
    try:
        its_pods = checked_pods(channel.call("GET", home, "/v1/pods", Wait(_ANSWER_SECONDS)), home)
        if set(pods) & set(its_pods):  # not all: while a service grows, its pods know other numbers of them
            return
        why = f"its pods are {_named(its_pods)}, and the service's {_named(pods)}"
        if not pods and not its_pods:  # as pods that run alone
            if _knows(channel, home, job, info):
                return
            why = f"it does not know job {job}, which the service has just been told of"
    except (AccessError, PodUnreachable):
        return
    except RefillError as error:
        raise _is_none(home, service_url, error.message) from error
    raise _is_none(home, service_url, why)


def _knows(channel: PodChannel, home: str, job: str, info: dict[str, Any]) -> bool:
    try:
        its_info = channel.call("GET", home, f"/v1/jobs/{quote(job, safe='')}", Wait(_ANSWER_SECONDS))
    except UnknownJob:
        return False
    return bool(its_info.get("incarnation") == info["incarnation"])


def _named(pods: list[str]) -> str:
    return ", ".join(pods[:_NAMED]) + (" and others" if len(pods) > _NAMED else "") or "not named"


def _is_none(home: str, service_url: str, why: str) -> InvalidInput:
    return InvalidInput(
        f"home={home} is no pod of the service {service_url}, whose receipts would lack what this rank had: {why}. "
        "Leave home= out, or name one of the service's pods"
    )
