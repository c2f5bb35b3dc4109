"""Sequences that grow a token a step: what they ask a decoder next, and what its answers become. Without torch."""
