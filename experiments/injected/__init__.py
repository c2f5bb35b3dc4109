"""Models that nobody here wrote, from file to service."""
