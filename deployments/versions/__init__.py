"""Versions of a model side by side: routing between them, comparison, and the model repository."""
