"""Who may ask: API keys and rate limits."""
