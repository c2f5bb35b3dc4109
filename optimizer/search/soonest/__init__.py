"""Plans of the least mean answer time: label setting block by block, pruned by Lagrangian bounds."""
