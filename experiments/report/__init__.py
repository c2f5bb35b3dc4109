"""Every study run, and one REPORT.md of what they gave."""
