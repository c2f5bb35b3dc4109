"""Divides the accelerators of a cluster among several models."""
