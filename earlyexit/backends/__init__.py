"""What computes a model's segments: torch, ONNX Runtime, CUDA graphs, or the fastest of them."""
