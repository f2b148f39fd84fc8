"""``kvfabric report``: a replay's series file, or a running fabric, as one HTML page."""
