"""In which order are the chunks of a share read, if nothing else matters? In an order of nested halves.

Of any run of reads half are of the first half of the share and half of the second, and so on within each. So memory
looks like the whole share at any time, though it be stored sorted, and neighbours are read far apart.
"""

from __future__ import annotations

import numpy as np

from refill.protocol.keyed_hash import key_of, numbers
from refill.protocol.wire_format import Int64Array


def chunks_in_order(num_chunks: int, key: int, number: int, num_shares: int) -> Int64Array:
    """The van der Corput sequence, scrambled digit by digit (Owen, "Randomly permuted (t,m,s)-nets and
    (t,s)-sequences", 1995): whether the first or the last half of each half of a half ... comes first is drawn.

    A power of two of places is put in order; chunks are at the places that come first, in the order of the dataset.
    """
    num_levels = (num_chunks - 1).bit_length()
    places = np.arange(1 << num_levels, dtype=np.int64)
    turns = np.zeros(len(places), dtype=np.int64)
    apart = max(1, (num_shares - 1).bit_length())
    for level in range(num_levels):
        drawn = numbers(key_of("half", level, key), 1 << level).astype(np.int64)[places >> (num_levels - level)]
        # Shares draw the same, and each goes the other way round at levels of its own, so that all together are even,
        # too; at the last level, which is half an epoch, it is every second share.
        other_way = number >> (num_levels - 1 - level) % apart
        turns |= ((places >> (num_levels - 1 - level)) ^ drawn ^ other_way) % 2 << level
    return np.argsort(turns[turns < num_chunks], kind="stable")
