"""Operating and judging the fabric: the command line, scenarios, simulation, benchmarks."""
