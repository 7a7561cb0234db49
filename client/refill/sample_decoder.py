"""How do the bytes of a sample become what the training loop gets, and does torch put samples of one batch together?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from refill.decoders import Decode, decode_member, make_decode
from refill.pod_connection import ReceivedBatch
from refill.tar_samples import parse_members

__all__ = ["SampleDecoder", "Transform", "why_not_alike"]

Transform = Callable[[dict[str, Any]], Any]


class SampleDecoder:
    """Raw tar ranges -> samples: ``{"__key__": str, "__id__": int, extension: value, ...}``, then ``transform``."""

    def __init__(self, decode: Decode, transform: Transform | None) -> None:
        self._decode = make_decode(decode)
        self._transform = transform

    def __call__(self, batch: ReceivedBatch, place: int, with_keys: bool = True) -> Any:
        """The sample at a place of a batch. Raises what the transform raises, with a note that names the sample, and
        :class:`SampleDamaged` for one that can't be read.

        :param with_keys: False leaves out ``__key__``.
        """
        if place in batch.damaged:
            raise batch.damaged[place]
        decode, transform = self._decode, self._transform
        sample_id = int(batch.sample_ids[place])
        key, members = parse_members(batch.payloads[place], sample_id)
        sample: dict[str, Any] = {"__key__": key, "__id__": sample_id} if with_keys else {"__id__": sample_id}
        for extension, view in members.items():
            # A copy: one sample kept by the caller must not keep the whole batch's buffer.
            data = bytes(view)
            sample[extension] = data if decode is None else decode_member(decode, extension, data, sample_id, key)
        if transform is None:
            return sample
        try:
            return transform(sample)
        except Exception as error:
            error.add_note(f"in the transform of sample {sample_id} ({key!r}), which has {_listed(members)}")
            raise


def why_not_alike(samples: Sequence[Any]) -> str | None:
    """Why torch does not put samples of one batch together, whose own error would name neither sample nor remedy; None
    where nothing is wrong, or where samples are no dicts."""
    if not samples or type(samples[0]) is not dict:
        return None
    members = samples[0].keys()
    other = next((each for each in samples if type(each) is dict and each.keys() != members), None)
    if other is None:
        return None
    return (
        f"samples of one batch have different members: {_members_of(samples[0])}, and {_members_of(other)}. "
        "torch's default collate_fn fails on that with a KeyError: transform=function of CacheDataset can give "
        "them the same names, or a collate_fn of your own deal with both"
    )


def _members_of(sample: dict[str, Any]) -> str:
    return f"sample {sample.get('__id__')} ({sample.get('__key__')!r}) has {_listed(sample)}"


def _listed(members: Iterable[str]) -> str:
    return ", ".join(sorted(name for name in members if not name.startswith("__"))) or "none"
