"""Sequences that grow by one token per step: their keys and values, sampling, and text."""
