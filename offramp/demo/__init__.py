"""The texts of the demo, which the project makes itself."""
