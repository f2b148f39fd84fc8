"""Ray Serve: request routers that know where state lies, and Ray Serve LLM's replicas over a fabric."""
