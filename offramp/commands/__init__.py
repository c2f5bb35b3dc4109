"""The commands of the command line: each takes its options as a pydantic model and prints a result."""
