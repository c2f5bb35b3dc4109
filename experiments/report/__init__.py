"""Runs every study and writes one REPORT.md with the results."""
