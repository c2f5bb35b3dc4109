"""Thresholds while serving: an alarm on what answers lose, and new thresholds from what the last inputs showed."""
