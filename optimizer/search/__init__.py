"""The search for plans: a graph of splits, prices that bound it, labels that find chains, and the master problem."""
