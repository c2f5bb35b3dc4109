"""The service on a clock of its own: live engine, admission and routing, and accelerators that only count."""
