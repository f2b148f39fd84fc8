"""``lanes_128`` (:mod:`digest`) as torch kernels: the same 16 bytes on a GPU, on torch's CPU and in numpy.

All words of a part are mixed by elementwise kernels and added up by one reduction; integer arithmetic
wraps modulo 2**64 and addition commutes, so the result does not depend on the order that a GPU takes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .digest import GAMMA, LANE_KEYS, MIX_1, MIX_2, WORD_BYTES, lanes_end

PART_WORDS = 4 << 20
"""Mixed at a time: each part takes three temporaries of its size."""
_U64 = (1 << 64) - 1


def _signed(value: int) -> int:
    """A 64-bit pattern as the int64 that torch computes with."""
    value &= _U64
    return value - (1 << 64) if value >> 63 else value


def _mix(words: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser, in place. int64 shifts keep the sign, so the bits that come in are masked off."""
    for shift, factor in ((30, MIX_1), (27, MIX_2)):
        words ^= (words >> shift) & ((1 << (64 - shift)) - 1)
        words *= _signed(factor)
    words ^= (words >> 31) & ((1 << 33) - 1)
    return words


def _sums(words: torch.Tensor, before: int) -> torch.Tensor:
    """The sum of each lane over int64 words of which ``before`` words come before: int64 of shape (2,)."""
    places = torch.arange(before + 1, before + 1 + words.numel(), dtype=torch.int64, device=words.device)
    places *= _signed(GAMMA)
    lanes = [_mix((places + _signed(key)).bitwise_xor_(words)).sum() for key in LANE_KEYS]
    return torch.stack(lanes)


def _lane_sums(view: torch.Tensor) -> torch.Tensor:
    """The sum of each lane over one uint8 tensor; its last word is filled up with zeros."""
    whole = view.numel() // WORD_BYTES * WORD_BYTES
    words = view[:whole].view(torch.int64) if whole else view.new_empty(0, dtype=torch.int64)
    total = torch.zeros(2, dtype=torch.int64, device=view.device)
    for first in range(0, words.numel(), PART_WORDS):
        total += _sums(words[first : first + PART_WORDS], first)
    if whole < view.numel():
        rest = torch.zeros(WORD_BYTES, dtype=torch.uint8, device=view.device)
        rest[: view.numel() - whole] = view[whole:]
        total += _sums(rest.view(torch.int64), words.numel())
    return total


def gpu_checksums(views: Sequence[torch.Tensor]) -> list[bytes]:
    """``lanes_128`` of contiguous uint8 tensors on one device that begin at multiples of 8 bytes.

    All kernels are queued first, then one copy brings every sum home: it waits for them.
    """
    if not views:
        return []
    sums = torch.stack([_lane_sums(view) for view in views]).tolist()
    return [
        lanes_end((int(one) & _U64, int(other) & _U64), view.numel())
        for (one, other), view in zip(sums, views, strict=True)
    ]
