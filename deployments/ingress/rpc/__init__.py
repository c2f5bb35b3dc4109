"""The Open Inference Protocol v2 over gRPC, beside HTTP; loaded only where a gRPC port is asked for."""
