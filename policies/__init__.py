"""Pure decisions: eviction, admission limits, placement, recovery order, checkpointing, costs."""
