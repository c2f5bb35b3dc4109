"""The Open Inference Protocol v2 over gRPC. It is imported only if a gRPC port is set."""
