"""What files does a sample of Python's values make in a tar? The inverse of what clients decode by extension."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from refill.errors import InvalidInput

_TEXT = ("txt", "text", "transcript")
_MOST_KEY_LETTERS = 200


def members_of(sample: Any, number: int) -> tuple[str, list[tuple[str, bytes]]]:
    """``(key, [(extension, bytes), ...])`` of a sample: a mapping of names of members to values.

    Bytes stay as they are, under their name. Other values get an extension that says how to decode them, unless their
    name ends with it: text ``.txt``, arrays and numbers of numpy ``.npy``, pictures of Pillow ``.png`` (or as their
    name says), a number called ``cls`` stays, and all else that JSON can say gets ``.json``. None is left out.

    Raises :class:`InvalidInput` that names the member.

    :param number: of the sample, its key where it has no ``__key__``.
    """
    if not isinstance(sample, Mapping):
        raise InvalidInput(
            f"a sample is a dict of names and values, as {{'jpg': data, 'cls': 3}}, got {type(sample).__name__}"
        )
    key = _key(sample.get("__key__"), number)
    members: dict[str, bytes] = {}
    for name, value in sample.items():
        if name == "__key__" or value is None:
            continue
        extension, content = _member(_name(name), value)
        if extension in members:
            raise InvalidInput(f"two members are called {extension!r}, in small letters and with what decodes them")
        members[extension] = content
    if not members:
        raise InvalidInput("it has no members")
    return key, sorted(members.items())


def _key(given: Any, number: int) -> str:
    if given is None:
        return f"{number:09}"
    key = str(given)
    folder, slash, name = key.rpartition("/")
    if not name or len(key) > _MOST_KEY_LETTERS or not key.isprintable() or key.startswith("/"):
        raise InvalidInput(f"its __key__ {key!r:.60} is no name of a file of at most {_MOST_KEY_LETTERS} letters")
    # Readers of tars split a name at the first dot.
    return folder + slash + name.replace(".", "%2E")


def _name(given: Any) -> str:
    name = given.lower() if isinstance(given, str) else ""
    if not name or "/" in name or not name.isprintable() or name.startswith((".", "__")) or name.endswith("."):
        raise InvalidInput(f"a member is called {given!r:.60}: give it a name such as jpg, cls or mask.png")
    return name


def _member(name: str, value: Any) -> tuple[str, bytes]:
    end = name.rpartition(".")[2]
    if isinstance(value, (bytes, bytearray, memoryview)):
        return name, bytes(value)
    if isinstance(value, str):
        return (name if end in _TEXT else f"{name}.txt"), value.encode()
    if name == "cls" and isinstance(value, (int, float, np.integer, np.floating)):
        if not float(value).is_integer():
            raise InvalidInput(
                f"member 'cls' is {value}: a label is a whole number; call other numbers by another name"
            )
        return name, str(int(value)).encode()
    if isinstance(value, (np.ndarray, np.generic)):
        return (name if end == "npy" else f"{name}.npy"), _npy(name, np.asarray(value))
    if hasattr(value, "save") and hasattr(value, "mode") and hasattr(value, "size"):
        return _picture(name, end, value)
    if hasattr(value, "numpy") and hasattr(value, "detach"):  # a tensor of torch
        return (name if end == "npy" else f"{name}.npy"), _npy(name, value.detach().cpu().numpy())
    try:
        return (name if end == "json" else f"{name}.json"), json.dumps(value, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(value, float) and not math.isfinite(value):
            return f"{name}.npy", _npy(name, np.asarray(value))
        raise InvalidInput(
            f"member {name!r} is a {type(value).__name__}, which is neither bytes, text, a number, an array, a picture"
            f" nor JSON: {error}"
        ) from error


def _npy(name: str, value: np.ndarray[Any, Any]) -> bytes:
    if value.dtype.hasobject:
        raise InvalidInput(f"member {name!r} is an array of Python's objects: nothing but a pickle could hold them")
    out = io.BytesIO()
    np.lib.format.write_array(out, value, allow_pickle=False)
    return out.getvalue()


def _picture(name: str, end: str, value: Any) -> tuple[str, bytes]:
    from PIL import Image

    kind = Image.registered_extensions().get(f".{end}")
    out = io.BytesIO()
    value.save(out, format=kind or "PNG")
    return (name if kind else f"{name}.png"), out.getvalue()
