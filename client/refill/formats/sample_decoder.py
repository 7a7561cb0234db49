"""How do the bytes of a sample become what the training loop gets, and are samples alike enough for one batch?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from refill.errors import InvalidInput
from refill.formats import parser_of
from refill.formats.asked_members import AskedMembers
from refill.formats.cut import cut_format
from refill.formats.decoders import Decode, as_view, decode_coded, decode_member, is_viewed, make_decode
from refill.formats.parsed import Coded, Parser
from refill.formats.tar_samples import parse_members
from refill.pods.received_batch import ReceivedBatch
from refill.protocol.sample_cut import SampleCut

Transform = Callable[[dict[str, Any]], Any]
Viewed = Callable[[memoryview], Any]
"""Bytes in a buffer -> what stands for them, not copied."""


class SampleDecoder:
    """Raw bytes of samples -> ``{"__key__": str, "__id__": int, extension or field: value, ...}``, then ``transform``,
    then the members that ``as_tuple`` names."""

    def __init__(
        self,
        decode: Decode,
        transform: Transform | None,
        as_tuple: Sequence[str] | None = None,
        beside: Mapping[str, Any] | None = None,
        cut: SampleCut | None = None,
        viewed: Viewed | None = None,
        asked: AskedMembers | None = None,
    ) -> None:
        """:param beside: what each sample has beside its members.
        :param cut: what of each sample pods send.
        :param viewed: makes views, where they are to be other than arrays.
        :param asked: looks whether there are the members that callers name.
        """
        self._cut = cut or SampleCut()
        self._asked = asked
        self._beside = dict(beside or {})
        self._decode = make_decode(decode)
        if transform is not None and not callable(transform):
            raise InvalidInput(f"transform must be a function of a sample, got {transform!r:.100}")
        self._asked_decode, self._viewed = decode, viewed or as_view
        self._has_views = as_view in decode.values() if isinstance(decode, Mapping) else decode == "views"
        self.transform = transform
        self.transform_of_first: Callable[[Any], Any] | None = None
        """Of the first item of a tuple."""
        self._wanted = None if as_tuple is None else _alternatives(as_tuple)
        self._parse: Parser = parse_members
        self.knows_dataset = False

    def dataset_is(self, metadata: Mapping[str, Any], labels: Callable[[], Any]) -> None:
        """Fact: what its index says, its format among it. Raises :class:`InvalidInput` for one that is unknown, or has
        not the fields that are wanted."""
        if metadata.get("format") is not None and not self._cut.is_whole:
            metadata = {**metadata, "format": cut_format(metadata["format"], self._cut)}
        self._parse, self.knows_dataset = parser_of(metadata, labels), True

    def __getstate__(self) -> dict[str, Any]:
        # Parsers stay in their process: each makes its own.
        return self.__dict__ | {"_parse": parse_members, "knows_dataset": False}

    @property
    def gives_views(self) -> bool:
        """Whether the loop gets views of bytes."""
        return self._has_views and self.transform is None

    @property
    def makes_tuples(self) -> bool:
        return self._wanted is not None

    def __call__(self, batch: ReceivedBatch, place: int, with_keys: bool = True) -> Any:
        """The sample at a place of a batch. Raises what the transform raises, with a note that names the sample, and
        :class:`SampleDamaged` for one that can't be read.

        :param with_keys: False leaves out ``__key__``.
        """
        if place in batch.damaged:
            raise batch.damaged[place]
        decode, transform = self._decode, self.transform
        sample_id = int(batch.sample_ids[place])
        key, members = self._parse(batch.payloads[place], sample_id)
        if self._asked is not None:
            self._asked.look(members)
        sample: dict[str, Any] = {"__key__": key, "__id__": sample_id} if with_keys else {"__id__": sample_id}
        if with_keys:
            sample |= self._beside
        for extension, view in members.items():
            if self._has_views and is_viewed(self._asked_decode, extension) and (buffer := _bytes_of(view)) is not None:
                sample[extension] = self._viewed(buffer)
            elif type(view) is memoryview:
                # A copy: one sample kept by the caller must not keep the whole batch's buffer.
                data = bytes(view)
                sample[extension] = data if decode is None else decode_member(decode, extension, data, sample_id, key)
            else:
                sample[extension] = self._value(extension, view, sample_id, key)
        try:
            found = sample if transform is None else transform(sample)
            if self._wanted is None:
                return found
            items = tuple(_chosen(found, names) for names in self._wanted)
            return items if self.transform_of_first is None else (self.transform_of_first(items[0]), *items[1:])
        except _NotThere as error:
            raise InvalidInput(f"sample {sample_id} ({key!r}) {error}") from None
        except Exception as error:
            error.add_note(f"in the transform of sample {sample_id} ({key!r}), which has {_listed(members)}")
            raise

    def _value(self, field: str, found: Any, sample_id: int, key: str) -> Any:
        """Of a field that a format describes."""
        if type(found) is Coded:
            data = bytes(found.data)
            return data if self._decode is None else decode_coded(self._decode, field, found.kind, data, sample_id, key)
        if type(found) is list and found and type(found[0]) is Coded:
            return [self._value(field, each, sample_id, key) for each in found]
        return found


def _bytes_of(found: Any) -> memoryview | None:
    """Of what a format has in a sample; None: it is no bytes."""
    data = found.data if type(found) is Coded else found
    return memoryview(data) if isinstance(data, (bytes, memoryview)) else None


class _NotThere(Exception):
    pass


def _alternatives(as_tuple: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """For each item of a tuple, the names of members of which the first is taken that there is."""
    if isinstance(as_tuple, str) or not isinstance(as_tuple, Sequence) or not len(as_tuple):
        raise InvalidInput(f'as_tuple must be names of members, as ("jpg", "cls"), got {as_tuple!r:.100}')
    found = []
    for item in as_tuple:
        names = tuple(name.strip().lstrip(".") for name in item.split(";")) if isinstance(item, str) else ()
        if not names or not all(names):
            raise InvalidInput(f'as_tuple must be names of members, as ("jpg;png", "cls"), got {item!r:.100} in it')
        found.append(names)
    return tuple(found)


def _chosen(sample: Any, names: tuple[str, ...]) -> Any:
    if not isinstance(sample, dict):
        raise _NotThere(
            f"is of type {type(sample).__name__}, as its transform returns it, and as_tuple takes members of a dict: "
            "have the transform return one, or leave as_tuple out"
        )
    for name in names:
        if name in sample:
            return sample[name]
    wanted = " or ".join(map(repr, names))
    there = ", ".join(repr(name) for name in sorted(sample))
    raise _NotThere(f"has no {wanted} for as_tuple: it has {there}")


def why_not_alike(samples: Sequence[Any]) -> str | None:
    """Two samples with different members, in words; None where there are none, or where samples are no dicts."""
    if not samples or type(samples[0]) is not dict:
        return None
    members = samples[0].keys()
    other = next((each for each in samples if type(each) is dict and each.keys() != members), None)
    if other is None:
        return None
    return f"samples of one batch have different members: {_members_of(samples[0])}, and {_members_of(other)}"


def check_alike(samples: Sequence[Any], remedy: str) -> None:
    """Raises :class:`InvalidInput`, naming two shapes, when the arrays in these samples are of several.

    :param remedy: what to do, in a sentence.
    """
    for other in samples[1:]:
        first, here = shapes_of(samples[0]), shapes_of(other)
        for name in first.keys() & here.keys():
            if first[name] != here[name]:
                raise InvalidInput(
                    f"a batch can't be made of samples of several shapes: {name or 'one'}{_of(samples[0])} is "
                    f"{first[name]}, and {name or 'another'}{_of(other)} is {here[name]}. {remedy}"
                )


def shapes_of(sample: Any) -> dict[str, tuple[int, ...]]:
    """Of the arrays and tensors in a sample."""
    if isinstance(sample, dict):
        items = [(str(name), value) for name, value in sample.items()]
    elif isinstance(sample, (tuple, list)):
        items = [(f"item {place}", value) for place, value in enumerate(sample)]
    else:
        items = [("", sample)]
    return {name: tuple(value.shape) for name, value in items if hasattr(value, "shape") and not is_view(value)}


def is_view(value: Any) -> bool:
    """Whether it is an array of bytes as they came, which are of any length: none that batches are stacked of."""
    return type(value) is np.ndarray and isinstance(value.base, memoryview)


def _of(sample: Any) -> str:
    """Which one it is, where it says so."""
    if not isinstance(sample, dict) or "__id__" not in sample:
        return ""
    return f" of sample {sample['__id__']}" + (f" ({sample['__key__']!r})" if "__key__" in sample else "")


def _members_of(sample: dict[str, Any]) -> str:
    return f"sample {sample.get('__id__')} ({sample.get('__key__')!r}) has {_listed(sample)}"


def _listed(members: Iterable[str]) -> str:
    return ", ".join(sorted(name for name in members if not name.startswith("__"))) or "none"
