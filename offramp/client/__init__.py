"""Clients for a running service, and the protocol between them and the service."""
