"""The batch engine alone, in this process: how fast it is, what it costs, and what exits and cuts gain."""
