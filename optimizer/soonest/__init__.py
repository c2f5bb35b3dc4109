"""Plans of the least mean answer time: labels block by block, pruned by prices."""
