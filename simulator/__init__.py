"""The service on a clock of its own: live engine, admission and routing, accelerators that only count."""
