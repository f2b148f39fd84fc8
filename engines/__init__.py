"""Adapters for inference engines, and the commands that need one."""
