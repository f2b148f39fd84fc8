"""Deterministic simulation: the protocol cores on a seeded network, clock, memory and disk.

One thread, one random generator, one queue of events. What runs here is what the actors drive;
nothing in the cores knows that it is simulated.
"""
