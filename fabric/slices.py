"""Work in slices: whoever drives it lets requests in between one and the next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def sliced(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """The items in order, so many at a time."""
    for begin in range(0, len(items), size):
        yield items[begin : begin + size]
