"""What is claimed of the live control loop, measured on the real Serve graph with emulated accelerators."""
