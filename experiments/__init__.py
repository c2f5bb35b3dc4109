"""Experiments that check the project's claims: load, simulator, peers, and one study per claim."""
