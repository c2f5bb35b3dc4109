"""The model side of Offramp: networks with early exits, ramps, exit policies and the batch engine. Needs no Ray."""

import os

from earlyexit.engine.cpu import avoid_hidden_tiles

avoid_hidden_tiles(os.environ)  # at import: oneDNN reads the variable at its first product
