"""Claims anyone can check: load, simulator, peers, one study per claim."""
