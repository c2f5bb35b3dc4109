"""Experiments on models that generate: the engine of a decoder alone."""
