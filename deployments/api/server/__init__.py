"""The HTTP server of an ingress."""
