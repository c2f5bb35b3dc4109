"""Segments recorded once per shape and replayed: on a GPU as CUDA graphs, one launch for a whole segment."""
