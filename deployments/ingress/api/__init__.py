"""The face to callers over HTTP: bodies, routes, their description, and the service behind them."""
