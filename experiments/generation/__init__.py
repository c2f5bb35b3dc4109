"""Models that generate: decoders' engines alone, the same tokens as others, promises of sequences, a demo."""
