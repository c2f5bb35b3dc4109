"""Thresholds with a guarantee, and the files that hold them."""
