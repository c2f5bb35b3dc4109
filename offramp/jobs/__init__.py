"""What the commands do: models trained, calibrated and profiled, plans made and played, inputs predicted in bulk."""
