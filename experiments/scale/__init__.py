"""Thousands of accelerators, on paper: what the design's parts cost there, measured, and what follows, simulated."""
