"""Plans, their placement on replicas, and their files."""
