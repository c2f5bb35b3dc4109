"""Exact search for plans of the highest rate or the lowest cost: label setting, pruned by Lagrangian bounds."""
