"""Accelerator types, and what a replica on one needs from the cluster."""
