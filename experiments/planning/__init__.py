"""Planners against each other."""
