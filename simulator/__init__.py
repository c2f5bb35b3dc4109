"""The service on a clock of its own: live engine, admission, routing and controller, accelerators that only count."""
