"""``kvfabric plan``: what a workload takes of a cluster, from a model's geometry."""
