"""Plans for text generation, where an input is one step of a sequence: its demand, cost model and promises."""
