"""Plans for problems that are too big for an exact search: a good plan, and a bound on all plans."""
