"""Training a whole model with all its exits at once (PAME section 5.2): `joint.py` is the recipe."""
