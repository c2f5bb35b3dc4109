"""What to do: pure decisions. No torch, no ray."""
