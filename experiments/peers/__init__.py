"""Compares Offramp with the servers that users would choose instead, each with its best settings."""
