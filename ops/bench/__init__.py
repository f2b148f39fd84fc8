"""Benchmarks, one file a subject; each returns its figures beside what they have to be."""
