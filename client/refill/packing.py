"""How does a script make a dataset of what it has in Python? :func:`pack`; the work is the service's."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from refill.errors import InvalidInput
from refill.protocol.sizes import parse_bytes

__all__ = ["pack"]


def pack(
    samples: Iterable[Any],
    url: str,
    *,
    function: Callable[[Any], Any] | None = None,
    shuffle: bool | None = None,
    seed: int = 0,
    blob_bytes: int | str = 64_000_000,
    classes: Sequence[str] | None = None,
    force: bool = False,
    quiet: bool = False,
    jobs: int | None = None,
) -> Any:
    """Write samples as a dataset to ``url``, in processes. Broken off, by an error or a kill, the same call with the
    same samples goes on where it was. Needs ``pip install 'refill-cache[service]'``.

    :param samples: dicts of members, as ``{"jpg": data, "cls": 3}``: bytes, text, numbers, arrays, pictures of Pillow,
        or what JSON can say; ``__key__``, if it is there, is the sample's name. With ``function``, what that makes such
        a dict of: paths, or rows. A Hugging Face dataset is taken as it is. Of a list, or what else has a length and
        numbers, a pack that goes on reads what is missing; an iterator is gone through from its beginning.
    :param url: ``s3://bucket/prefix`` or ``file:///folder``; credentials and servers as those of ``refill pack``.
    :param function: called in the processes: define it at the top of a module, or of a script whose call of this stands
        below ``if __name__ == "__main__":``.
    :param shuffle: whether samples are stored in an order that follows from ``seed``. None: where they have a length
        and numbers.
    :param blob_bytes: about how large a tar becomes, such as ``"64MB"``.
    :param classes: names of the numbers in members ``cls``.
    :param force: replace a dataset that is there.
    :param quiet: show no progress.
    :param jobs: processes; 1: none but this one. None: two more than there are cores, where ``samples`` are no iterator
        alone and take 256 MB or more.

    Returns what was packed: ``num_samples``, ``num_blobs``, ``blob_bytes``, ``num_kept`` (samples that were stored
    before), ``seconds``, and over all processes ``making_seconds`` and ``storing_seconds``.

    Raises :class:`DatasetExists`, :class:`EmptyDataset`, :class:`InvalidInput` with the number of an item that can't be
    packed, and errors of the store.
    """
    try:
        service = importlib.import_module("refill_service.datasets.pack_samples")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"refill.pack needs {error.name}: pip install 'refill-cache[service]'", name=error.name
        ) from None

    try:
        blob_bytes = parse_bytes(blob_bytes)
    except ValueError as error:
        raise InvalidInput(f"blob_bytes: {error}") from None

    def packed() -> Any:
        return asyncio.run(
            service.pack_samples(
                samples,
                url,
                function=function,
                shuffle=shuffle,
                seed=seed,
                blob_bytes=blob_bytes,
                classes=classes,
                force=force,
                quiet=quiet,
                jobs=jobs,
            )
        )

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass
    else:  # of a notebook, whose thread has a loop already
        with ThreadPoolExecutor(1) as own:
            return own.submit(packed).result()
    return packed()  # not above: what it raises would have two causes
