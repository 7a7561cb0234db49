"""``refill top``: jobs, ranks and pods live in a terminal, for those without a Grafana."""

from __future__ import annotations

import argparse
import os
import re
import select
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx

from refill.errors import InvalidInput, PodUnreachable
from refill_service.commands.service_arguments import add_service_arguments, ask, client_of
from refill_service.top.scrape import PodScrape, Scrape

_TIMEOUT_SECONDS = 5
_MAX_AT_ONCE = 16
_PIPED_WIDTH = 200


def add_commands(commands: Any) -> None:
    parser = commands.add_parser(
        "top",
        description="Show how jobs, their ranks and the pods are doing: time waited for data, samples a second, "
        "misses, waste, progress, memory, store. The jobs that read most come first; those that no rank uses share a "
        "line. Arrows and pages scroll, and q ends it. Into a pipe or a file it prints the figures once.",
        epilog="example: refill top http://refill:8000",
    )
    parser.add_argument("service", metavar="URL", nargs="?", help="as --url")
    add_service_arguments(parser, "--url")
    parser.add_argument("--once", action="store_true", help="print the figures once, after one interval, and end")
    parser.add_argument(
        "--interval",
        type=_seconds,
        default=2.0,
        metavar="SECONDS",
        help="how often figures are shown anew (default: %(default)g)",
    )
    parser.add_argument(
        "--window",
        type=_seconds,
        default=20.0,
        metavar="SECONDS",
        help="over how long rates are taken (default: %(default)g)",
    )
    parser.set_defaults(func=_run, url_if_none=parser.get_default("url"))


def _run(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.live import Live

    from refill_service.top.top_figures import figures_between
    from refill_service.top.top_view import Screen, frame

    if args.service is not None and args.url not in (args.service, args.url_if_none):
        raise InvalidInput(f"{args.service} and --url {args.url} are two services: name one")
    args.url = args.service or args.url
    console = Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH, highlight=False)
    goes_on = not args.once and console.is_terminal and not console.is_dumb_terminal
    with _Pods(args.url, client_of(args, _TIMEOUT_SECONDS)) as pods, Keys(goes_on) as keys:
        scrapes = deque([pods.first_scrape()])

        def next_frame() -> Callable[[bool], Any]:
            scrapes.append(pods.scrape())
            while len(scrapes) > 2 and scrapes[-1].at_seconds - scrapes[1].at_seconds >= args.window:
                scrapes.popleft()
            before, now = scrapes[0], scrapes[-1]
            figures, over_seconds = figures_between(before, now), now.at_seconds - before.at_seconds
            return lambda is_close: frame(args.url, figures, over_seconds, is_close=is_close)

        if not goes_on:
            time.sleep(args.interval)
            console.print(next_frame()(False))
            return 0
        pressed = keys.pressed(time.monotonic() + args.interval)
        if pressed is not None and pressed.leave:
            return 0
        screen = Screen(next_frame())
        with suppress(KeyboardInterrupt), Live(screen, console=console, screen=True, auto_refresh=False) as live:
            next_at = time.monotonic() + args.interval
            while (pressed := keys.pressed(next_at)) is None or not pressed.leave:
                if pressed is not None:
                    screen.scroll(pressed.lines, pressed.pages)
                else:
                    screen.frame_of = next_frame()
                    next_at = time.monotonic() + args.interval
                live.refresh()
    return 0


class _Pods:
    """All pods of the cache that a URL leads to. A context manager, which closes the client."""

    def __init__(self, url: str, client: httpx.Client) -> None:
        self._url = url.rstrip("/")
        self._client = client
        self._threads = ThreadPoolExecutor(_MAX_AT_ONCE)
        self._urls: list[str] = []

    def __enter__(self) -> _Pods:
        try:
            self._urls = self._pod_urls() or [self._url]
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        self._threads.shutdown()
        self._client.close()

    def first_scrape(self) -> Scrape:
        """:raises PodUnreachable: when no pod answers; later they may all go away and come back."""
        found = self.scrape()
        if not any(found.pods.values()):
            raise PodUnreachable(f"no pod answers: {', '.join(self._urls)}", url=self._url)
        return found

    def scrape(self) -> Scrape:
        """Of all pods at once."""
        at_seconds = time.monotonic()
        pods = dict(zip(self._urls, self._threads.map(self._scrape_pod, self._urls), strict=True))
        return Scrape(at_seconds, pods)

    def _scrape_pod(self, url: str) -> PodScrape | None:
        try:
            answer = self._client.get(f"{url}/metrics")
        except (httpx.HTTPError, httpx.InvalidURL):
            return None
        return PodScrape.parse(answer.text, url) if answer.status_code == 200 else None

    def _pod_urls(self) -> list[str]:
        """The pods' own URLs. From outside of the cluster only the one that was given may lead to a pod."""
        content = ask(self._client, "GET", self._url, "/v1/pods")
        match content:
            case {"ordinal": int(ordinal), "pods": [*urls]}:
                known = [str(url) for url in urls]
            case _:
                raise InvalidInput(f"{self._url} answers, but is not a pod of refill")
        if 0 <= ordinal < len(known) and self._scrape_pod(known[ordinal]) is None:
            known[ordinal] = self._url
        return known


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time from 0.1 to 3600 seconds")
    return seconds


_LINES = {b"\x1b[A": -1, b"\x1bOA": -1, b"k": -1, b"\x1b[B": 1, b"\x1bOB": 1, b"j": 1}
_PAGES = {b"\x1b[5~": -1, b"\x1b[6~": 1, b" ": 1}
_KEY = re.compile(rb"\x1b[\[O][0-9;]*[~A-Za-z]|.", re.DOTALL)
"""One key: what arrows and the like send, or one letter."""


@dataclass(frozen=True)
class Pressed:
    """How far to scroll, down where it is positive."""

    leave: bool = False
    lines: int = 0
    pages: int = 0


class Keys:
    """A context manager, which gives the terminal its settings back.

    :param watched: False: nobody is at a terminal, or its keys are another program's.
    """

    def __init__(self, watched: bool) -> None:
        self._watched = watched and sys.stdin is not None and sys.stdin.isatty()
        self._was: list[Any] = []

    def __enter__(self) -> Keys:
        if self._watched:
            self._was = termios.tcgetattr(sys.stdin)
            tty.setcbreak(sys.stdin)
        return self

    def __exit__(self, *raised: object) -> None:
        if self._was:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._was)

    def pressed(self, until: float) -> Pressed | None:
        """At once when there is something to do; None: nothing was pressed until then.

        :param until: a time of :func:`time.monotonic`.
        """
        while (rest := until - time.monotonic()) > 0:
            if not self._watched:
                time.sleep(rest)
            elif select.select([sys.stdin], [], [], rest)[0]:
                found = os.read(sys.stdin.fileno(), 64)
                self._watched = bool(found)  # the terminal is gone where nothing comes
                keys = _KEY.findall(found)
                if b"q" in keys or b"Q" in keys:
                    return Pressed(leave=True)
                lines, pages = (sum(of.get(key, 0) for key in keys) for of in (_LINES, _PAGES))
                if lines or pages:
                    return Pressed(lines=lines, pages=pages)
        return None
