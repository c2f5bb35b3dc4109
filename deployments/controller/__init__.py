"""The controller observes the service, decides on plans and thresholds, and carries them out."""
