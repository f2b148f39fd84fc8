"""A KV-cache fabric for LLM inference on Ray clusters."""
