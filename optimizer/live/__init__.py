"""Decisions of the live control loop: pure functions from observations to a decision and its reason."""
