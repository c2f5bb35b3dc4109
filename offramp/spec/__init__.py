"""Service files: their fields, how they are read, and the Ray Serve application that is built from them."""
