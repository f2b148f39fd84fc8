"""Public traces replayed through the core: what a policy is worth is judged here."""
