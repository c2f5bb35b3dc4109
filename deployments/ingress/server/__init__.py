"""The HTTP server of an ingress: httptools on the event loop that Serve has, in the place where Serve puts uvicorn."""
