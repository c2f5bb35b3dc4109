"""What a plan promises: rate, latency and cost, by the cost model of E3."""
