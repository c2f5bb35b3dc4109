"""A service as a file: what it holds, how it is read, and how it reaches a cluster."""
