"""A page's bytes where SGLang's host pool holds them, cut into the fabric's blocks.

A page is a list of parts of host memory: one or two in the page-first layouts, one a layer and component
in ``layer_first``. Its blocks are these parts in order, cut every ``block_bytes``; what the last block has
behind them is zeros. The fabric copies straight between these parts and its arena.

A pool that cannot name its parts (a state with side tables, an index in ``layer_first``) gives a flat copy.
The two orders differ, so a page's name tells them apart (:class:`Form`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ..shared.parts import Bytes, Parts, memory


class Form(StrEnum):
    """The order of a page's bytes."""

    PARTS = "parts"
    """As ``get_page_buffer_meta`` names them."""
    FLAT = "flat"
    """As ``get_data_page`` copies them."""


@dataclass(slots=True)
class Page:
    """One page of a pool. ``flat``: the copy that stands for it, and ``index`` where it belongs; None without one."""

    parts: Parts
    form: Form
    index: int
    flat: Any = None

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


class PoolPages:
    """The pages of one of SGLang's host pools. ``page_bytes``: of one page, in the form it is held in."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        # Indices of one page; under DCP a page has fewer rows on a rank than tokens.
        self.page_indices = int(getattr(pool, "logical_page_size", None) or pool.page_size or 1)
        try:
            sizes = (pool.get_page_buffer_meta(_indices(range(self.page_indices))) or ((), ()))[1]
            self.form, self.page_bytes = Form.PARTS, sum(int(size) for size in sizes)
        except (NotImplementedError, ValueError):
            self.form, self.page_bytes = Form.FLAT, pool.get_dummy_flat_data_page().nbytes

    def at(self, indices: Sequence[int], *, reading: bool) -> list[Page]:
        """The pages that these host indices, a page's behind each other, stand for.

        ``reading``: the pool's bytes are wanted, so a flat copy is taken of them. Raises ValueError for a part of a page.
        """
        if len(indices) % self.page_indices:
            raise ValueError(f"{len(indices)} host indices are no whole pages of {self.page_indices}")
        starts = [int(indices[at]) for at in range(0, len(indices), self.page_indices)]
        if self.form is Form.FLAT:
            return [self._flat(start, reading=reading) for start in starts]
        if not starts:
            return []
        pointers, sizes = self._pool.get_page_buffer_meta(_indices(indices)) or ((), ())
        per_page = len(pointers) // len(starts)
        return [
            Page(
                [memory(int(pointers[i]), int(sizes[i])) for i in range(n * per_page, (n + 1) * per_page)],
                Form.PARTS,
                start,
            )
            for n, start in enumerate(starts)
        ]

    def _flat(self, start: int, *, reading: bool) -> Page:
        flat = self._pool.get_data_page(start, flat=True) if reading else self._pool.get_dummy_flat_data_page()
        flat = flat.contiguous()
        return Page([as_bytes(flat)], Form.FLAT, start, flat)

    def landed(self, pages: Iterable[Page]) -> None:
        """Put what was read into flat copies where it belongs."""
        for page in pages:
            if page.flat is not None:
                self._pool.set_from_flat_data_page(page.index, page.flat)


def as_bytes(tensor: Any) -> Bytes:
    """A contiguous CPU tensor's memory as bytes, shared."""
    import torch

    held: Bytes = tensor.reshape(-1).view(torch.uint8).numpy()
    return held


def _indices(values: Iterable[int]) -> Any:
    import torch

    return torch.tensor(list(values), dtype=torch.int64)
