"""What runs: models that can be cut and left early, ramps, exit policies, the batch engine. torch, no ray."""
