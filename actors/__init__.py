"""The fabric's processes on Ray, and the sessions that speak to them: thin shells around the cores."""
