"""Networks that can be cut: blocks, ramps, pieces, and how a model is stored and loaded."""
