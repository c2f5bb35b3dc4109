"""Inputs of unequal lengths: batches bounded by tokens, what they take, and who is let in."""
