"""Threads that nobody joins, and a process that ends or forks meanwhile."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

from tests.forked_processes import start_rank

from refill.pods.background_work import background_work

ENDS_WHILE_A_THREAD_WORKS = """
import torch
from refill.pods.home_watch import watch_home

class Connection:
    look_every_seconds = 0.0

    def look_after_home(self):
        looked.append(int(place[0]))

looked, place = [], torch.zeros(1)
connection = Connection()
watch_home(connection)
while len(looked) < {looks}:
    pass
"""


def test_a_process_ends_in_order_though_a_thread_is_in_a_call_of_torch(tmp_path: Path) -> None:
    """The interpreter's lock, refused to such a thread, is ``terminate called without an active exception``."""
    for looks in (10, 20, 40, 80, 160):
        script = tmp_path / f"{looks}.py"
        script.write_text(ENDS_WHILE_A_THREAD_WORKS.format(looks=looks))
        process, *streams = start_rank(script, ends_whole=True)
        for each in streams:
            each.close()
        assert process.wait(60) == 0, f"it was aborted ({-signal.SIGABRT}) as it ended after {looks} calls"


def test_a_fork_waits_for_what_is_under_way_and_both_go_on() -> None:
    begun, may_end, ended = threading.Event(), threading.Event(), []

    def work() -> None:
        with background_work():
            begun.set()
            may_end.wait(0.05)  # a fork does not wait for ever
            ended.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    pid = os.fork()
    if pid == 0:
        with background_work():  # nobody is at work here
            os._exit(0 if ended else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, "it forked in the middle"
    thread.join()
    with background_work():
        pass
