"""How is Thrift's compact protocol read, which headers of Parquet are in? Value by value, without an object for each.

Bytes may be anybody's: whatever they say, what is read is no more than they are, and ends with them.
"""

from __future__ import annotations

from collections.abc import Iterator

_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY = 1, 2, 3, 7, 8
INTEGERS = (4, 5, 6)
_SET, _MAP = 10, 11
LIST, STRUCT = 9, 12
_MOST_NESTING = 16


class ThriftDamaged(ValueError):
    """Why it can't be read on."""


class CompactReader:
    """Each value that :meth:`fields` and :meth:`items` tell of must be read, or passed over, before the next.

    All methods raise :class:`ThriftDamaged`.
    """

    def __init__(self, data: memoryview) -> None:
        self.place = 0
        self._data = data

    def fields(self) -> Iterator[tuple[int, int]]:
        """Of a struct: ``(number, kind)`` of each field."""
        number = 0
        while (tag := self._byte()) != 0:
            number = number + (tag >> 4) if tag >> 4 else self.integer()
            yield number, tag & 15

    def items(self) -> tuple[int, int]:
        """Of a list: how many items follow, and their kind."""
        tag = self._byte()
        return (self._varint() if tag >> 4 == 15 else tag >> 4), tag & 15

    def integer(self) -> int:
        found = self._varint()
        return (found >> 1) ^ -(found & 1)

    def integers(self, most: int) -> list[int]:
        """A list of at most so many."""
        count, kind = self.items()
        if count > most or (count and kind not in INTEGERS):
            raise ThriftDamaged(f"a list of {count} items of kind {kind}, where at most {most} numbers are read")
        return [self.integer() for _ in range(count)]

    def texts(self, most: int) -> list[bytes]:
        """A list of at most so many."""
        count, kind = self.items()
        if count > most or (count and kind != _BINARY):
            raise ThriftDamaged(f"a list of {count} items of kind {kind}, where at most {most} texts are read")
        return [self._text() for _ in range(count)]

    def pass_over(self, kind: int, depth: int = 0) -> None:
        """A field's value."""
        if kind in INTEGERS:
            self._varint()
        elif kind == _BINARY:
            length = self._varint()  # which moves the place, too
            self.place += length
        elif kind == STRUCT and depth < _MOST_NESTING:
            for _, below in self.fields():
                self.pass_over(below, depth + 1)
        elif kind in (LIST, _SET) and depth < _MOST_NESTING:
            self._pass_over_items(depth)
        elif kind == _DOUBLE:
            self.place += 8
        elif kind == _BYTE:
            self.place += 1
        elif kind not in (_TRUE, _FALSE):  # no header of Parquet has a map
            raise ThriftDamaged(f"a value of kind {kind}, {depth} deep")

    def _pass_over_items(self, depth: int) -> None:
        count, kind = self.items()
        if kind in (_TRUE, _FALSE, _BYTE, _DOUBLE):
            self.place += count * (8 if kind == _DOUBLE else 1)
            return
        for _ in range(count):  # each takes a byte at least
            self.pass_over(kind, depth + 1)

    def _text(self) -> bytes:
        length = self._varint()
        start = self.place
        self.place += length
        if self.place > len(self._data):
            raise ThriftDamaged("it is cut off")
        return bytes(self._data[start : self.place])

    def _byte(self) -> int:
        try:
            found = self._data[self.place]
        except IndexError as error:
            raise ThriftDamaged("it is cut off") from error
        self.place += 1
        return found

    def _varint(self) -> int:
        found = shift = 0
        while True:
            byte = self._byte()
            found |= (byte & 127) << shift
            if byte < 128:
                return found
            shift += 7
            if shift > 63:
                raise ThriftDamaged("a number of more than ten bytes")
