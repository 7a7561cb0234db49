"""What does a training process tell the test that started it? Lines of JSON, in a file of each process.

Scripts of this folder import it as ``from lines import tell``. A line is one write, so that it survives SIGKILL.
"""

from __future__ import annotations

import json
import multiprocessing
import os

# Python 3.14 would start loader workers anew, which import the script; these scripts have no main guard.
multiprocessing.set_start_method("fork", force=True)

FOLDER_VARIABLE = "TRAINER_LINES"


def tell(**line: object) -> None:
    path = f"{os.environ[FOLDER_VARIABLE]}/{os.getpid()}.jsonl"
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, (json.dumps(line) + "\n").encode())
    os.close(file)
