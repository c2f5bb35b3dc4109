"""Compares planners, and replays traces against the controller."""
