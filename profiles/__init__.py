"""Latency profiles, exit records of models, observations of the live stream, and forecasts."""
