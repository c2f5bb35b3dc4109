"""The interface to callers: HTTP routes, OpenAI routes, the v2 protocol over HTTP and gRPC, and access control."""
