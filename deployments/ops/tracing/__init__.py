"""Traces of sampled requests."""
