"""Measures the batch engine alone, in this process: its speed, its overhead, and the gain from exits and cuts."""
