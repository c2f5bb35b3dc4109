"""Cascades of networks: what they gain, what is promised of them and kept, and words pruned on the way."""
