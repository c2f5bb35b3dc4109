"""Data for operators: the live page, Prometheus metrics and traces."""
