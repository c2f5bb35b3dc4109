"""Clients for a running service, and what they and the service say to each other."""
