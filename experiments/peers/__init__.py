"""What a user would pick instead, served as well as it can be."""
