"""The HTTP server of an ingress: uvicorn on the event loop that Serve has, with bounds on what callers may send."""
