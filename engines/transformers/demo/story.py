"""The demo's prompts and positions: fixed functions of a seed, the same in every process.

The writer prefills one prompt in chunks; the reader's prompts share its first tokens and go on
differently. Every run has the same chunk boundaries: a matrix product over another number of rows
may round differently, and runs are compared bit for bit.
"""

from __future__ import annotations

DECODE_TOKENS = 32
CHUNK_TOKENS = 128
SUFFIX_TOKENS = 8

ALIGNED, RAGGED = 960, 1002
"""Where the long prompts resume: a multiple of lcm(4, 16), the compression ratios, where no raw tail
is left over; and a position that neither divides, where tails hold what no compressed entry holds yet."""

FAULT_ALIGNED, FAULT_RAGGED = 64, 70
"""The same for the faults. In a short prompt one wrong entry of few is soon attended to."""

BASE = 32
"""Where complete state lies beneath every fault: the shorter prefix that is left."""

POSITIONS = (ALIGNED, RAGGED)
CUTS = tuple(
    sorted(
        {*range(CHUNK_TOKENS, RAGGED, CHUNK_TOKENS), *POSITIONS, BASE, FAULT_ALIGNED, FAULT_RAGGED - 1, FAULT_RAGGED}
    )
)
"""Where chunks end: a resume position is one, and of some faults the longest prefix left is a token shorter."""

FAULTS_AT = {
    "history_of_other_weights": FAULT_RAGGED,
    "history_rope_layout": FAULT_RAGGED,
    "tail_missing": FAULT_RAGGED,
    "tail_one_token_short": FAULT_RAGGED,
    "overlap_missing_aligned": FAULT_ALIGNED,
    "window_one_row_short": FAULT_RAGGED,
    "window_one_token_off": FAULT_RAGGED,
    "indexer_one_block_short": FAULT_RAGGED,
    "indexer_of_other_weights": FAULT_RAGGED,
    "indexer_other_rotation": FAULT_RAGGED,
    "state_missing": FAULT_RAGGED,
    "state_of_previous_position": FAULT_RAGGED,
    "state_transposed": FAULT_RAGGED,
}
"""Which faults are shown, and where; a model has those of its kinds."""

NOT_RESTORED, TORN, STALE_PAGE_TABLE = "disk_not_restored", "disk_torn", "disk_page_table_stale"
DISK_FAULTS = {
    NOT_RESTORED: "all behind the base lies on disk; the page table points to slots that nobody filled yet",
    TORN: "the last group's extent was torn: its write reported success and stopped in the first block",
    STALE_PAGE_TABLE: "restored from disk, but the page table points to the slots of before, where other state lies",
}
"""What is shown of state on A's disk, all at FAULT_RAGGED."""

_WRITER_SEED, _READER_SEED, _OTHER_SEED = 1, 101, 7


def writer_prompt(tokens: int = RAGGED) -> list[int]:
    """The first ``tokens`` token ids of the writer's prompt."""
    from ..tiny_models import prompt

    return prompt(_WRITER_SEED, tokens)


def reader_prompt(position: int) -> list[int]:
    """The writer's first ``position`` token ids, then SUFFIX_TOKENS others."""
    from ..tiny_models import prompt

    return writer_prompt(position) + prompt(_READER_SEED, SUFFIX_TOKENS)


def other_prompt(tokens: int) -> list[int]:
    """A prompt whose state has taken the slots that another's had."""
    from ..tiny_models import prompt

    return prompt(_OTHER_SEED, tokens)


def warm_up_prompt() -> list[int]:
    """Tokens of neither, to run once before anything is timed."""
    from ..tiny_models import prompt

    return prompt(0, CHUNK_TOKENS)


def salt_of(fault: str) -> bytes:
    """Each fault lives in a namespace of its own."""
    return f"demo/{fault}".encode()
