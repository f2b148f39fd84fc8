"""The model of the fabric: pure, deterministic, driven from outside."""
