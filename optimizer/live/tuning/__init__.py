"""Tuners: they adapt the thresholds of a service to its stream, with an alarm on the loss of its answers."""
