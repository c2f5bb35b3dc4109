"""Plans for problems too big to search exactly: a good one, and a bound on all."""
