"""The live page: what the whole service does, once a second, to whoever looks, and nothing at all where nobody does."""
