"""How is work done at once, when what one part has got must not be lost to another part's failure?"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from refill_service.memory.loop_turns import in_turn

__all__ = ["all_done"]

Result = TypeVar("Result")


async def all_done(*work: Coroutine[Any, Any, Result]) -> list[Result]:
    """Run all to their end, then raise the first error: what one owner answered is not lost to another's failure."""
    if len(work) == 1:
        return [await work[0]]
    results = await asyncio.gather(*map(in_turn, work), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]
