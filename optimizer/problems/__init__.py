"""Planning problems, and the files that hold them."""
