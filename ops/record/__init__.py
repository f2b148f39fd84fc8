"""What happened to one chain, as a scenario that can be replayed."""
