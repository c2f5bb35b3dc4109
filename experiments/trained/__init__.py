"""The data sets that experiments look at, and the models trained on them, once, and kept."""
