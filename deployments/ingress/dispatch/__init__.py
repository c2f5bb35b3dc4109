"""Carries out what the core decides: pieces out over connections, parts of replies in, one timer, answers to owners."""
