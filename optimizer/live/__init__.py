"""What the live control loop decides: pure functions from what was seen to a verdict in words."""
