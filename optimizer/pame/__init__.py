"""PAME's exit search (ICS'22, section 6): chooses the exits of a batch by their time and by recorded batches."""
