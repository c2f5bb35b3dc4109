"""Sequences that grow a token a step, served as streams: the ingress keeps the loop, replicas keep keys and values."""
