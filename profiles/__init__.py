"""What we know: exit records, and what follows from them."""
