"""What operators use: the live page's data and traces."""
