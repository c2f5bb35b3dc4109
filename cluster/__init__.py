"""Accelerator types, inventories of clusters, prices, and emulated accelerators."""
