"""The Open Inference Protocol v2 over gRPC. It is loaded only where a gRPC port is set."""
