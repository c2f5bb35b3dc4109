"""Plans of decoders, whose inputs are the steps of sequences: what a sequence asks, and what bounds its plans."""
