"""The load generator: when requests arrive, what is sent, and the report of what came back."""
