"""A service as a file: its fields, how it is read, and the application that follows from it."""
