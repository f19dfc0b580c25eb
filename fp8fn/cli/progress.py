"""A progress bar over work that runs in threads, one for each processor where the compiler releases the GIL."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def in_threads(
    function: Callable[[_Item], _Result], items: Sequence[_Item], unit: str, threads: int | None = None
) -> list[_Result]:
    """The function's results, in the order of the items."""
    from tqdm import tqdm

    with ThreadPoolExecutor(threads or os.cpu_count() or 1) as pool, tqdm(total=len(items), unit=unit) as bar:
        found = []
        for each in pool.map(function, items):
            found.append(each)
            bar.update()
    return found
