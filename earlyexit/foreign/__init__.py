"""Models from elsewhere, as ONNX files or torch modules: read, cut at tensors, and given ramps."""
