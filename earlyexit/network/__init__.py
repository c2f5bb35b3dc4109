"""Networks that run in parts: blocks, ramps, the pieces that pass between parts, and the files of a model."""
