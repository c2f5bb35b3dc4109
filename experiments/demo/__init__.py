"""What `make demo` trains and serves: texts that the project generates itself, and the run around them."""
