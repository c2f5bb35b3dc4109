"""Versions of a model side by side: who is there, who answers a request, and how two of them compare."""
