"""`offramp demo`: trains a model, and compares plans on a running service."""
