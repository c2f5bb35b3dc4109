"""Sequences that grow by a token per step: keys and values, sampling, and text."""
