"""What is done about inputs: admission, calls, retries, probes, outcomes. Decisions, without network or clock."""
