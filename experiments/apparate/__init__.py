"""Workloads like those of Apparate's evaluation (SOSP'24, section 5.1), recorded once and replayed per strategy."""
