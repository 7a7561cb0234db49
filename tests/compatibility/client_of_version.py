"""One training process, run by the Python of some version: ``python client_of_version.py JSON``.

Iterates over an epoch, from a state if there is one, up to so many samples; prints the ids that it got, its version and
the state that it leaves. It uses what every release promises, and no test of ours.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import refill


def main(asked: dict[str, Any]) -> dict[str, Any]:
    reader = refill.iterate(
        asked["service"],
        dataset=asked["dataset"],
        job=asked["job"],
        seed=7,
        chunk_size=16,
        memory_bytes=600_000,
        timeout_seconds=120,
        rank=0,
        world_size=1,
        threads=1,
    )
    if asked["state"] is None:
        reader.set_epoch(asked["epoch"])
    else:
        reader.load_state_dict(asked["state"])
    ids = []
    for sample in reader:
        ids.append(int(sample["__id__"]))
        if len(ids) == asked["stop_after"]:
            break
    return {"ids": ids, "version": refill.__version__, "file": refill.__file__, "state": reader.state_dict()}


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
