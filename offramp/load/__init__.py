"""The load generator: arrival processes, requests, and the report of a run."""
