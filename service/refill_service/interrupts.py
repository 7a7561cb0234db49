"""How does a command start processes so that Ctrl-C or SIGTERM leaves none of them behind?"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

_INTERRUPTS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def interrupts_after() -> Iterator[None]:
    """Holds SIGINT and SIGTERM back until the block has ended, and lets them come then.

    For ``processes.append(subprocess.Popen(...))``: the process runs before ``Popen`` returns, and an interrupt in
    between would leave it to nobody.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # signals interrupt the main thread alone, and only it may say what they do
        return
    came: list[int] = []
    before = {each: signal.signal(each, lambda number, _frame: came.append(number)) for each in _INTERRUPTS}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, signal.SIG_DFL if handler is None else handler)  # None: it was not Python's
        for number in came:  # also where the block failed
            signal.raise_signal(number)
