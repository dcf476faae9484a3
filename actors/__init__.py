"""Where clients and the server live: Ray actors, the fleet in front of them, and their metrics."""
