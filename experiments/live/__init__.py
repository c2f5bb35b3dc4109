"""Measurements of the live control loop on the real Serve application with emulated accelerators."""
