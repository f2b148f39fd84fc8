"""The rule engine's door: what a resume needs, where one is possible, and what cut it.

The rules themselves are ``needs.py``; solved for all positions in ``erosion.py``; explained in
``cause.py``.
"""

from __future__ import annotations

from .cause import Cut, Resolution, resolve, serve_limits, what_would_lengthen
from .erosion import choose_revisions, hash_tokens, servable, usable_position
from .needs import needs, needs_past

__all__ = [
    "Cut",
    "Resolution",
    "choose_revisions",
    "hash_tokens",
    "needs",
    "needs_past",
    "resolve",
    "servable",
    "serve_limits",
    "usable_position",
    "what_would_lengthen",
]
