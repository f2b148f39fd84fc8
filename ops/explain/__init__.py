"""``kvfabric explain``: why a hit ends where it ends."""
