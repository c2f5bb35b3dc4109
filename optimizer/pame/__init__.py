"""PAME's search (ICS'22, section 6): which exits a batch of a given size is worth, by time and batching pattern."""
