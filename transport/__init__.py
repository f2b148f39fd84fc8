"""Moves bytes between arenas, and requests between processes. No policies, no Ray."""
