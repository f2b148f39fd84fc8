"""What is wrong with a fabric and its cluster, and what to do about it."""
