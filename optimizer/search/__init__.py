"""The search for the best plan of a problem, with its gap to a proven bound."""
