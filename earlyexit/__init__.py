"""What runs: models that can be cut and left early, ramps, exit policies, the batch engine. torch, no ray."""

import os

from earlyexit.engine.cpu import avoid_hidden_tiles

avoid_hidden_tiles(os.environ)  # here, because whatever multiplies imports this package first
