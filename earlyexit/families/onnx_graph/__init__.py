"""The family `onnx`: a graph that nobody here wrote, cut at tensors by their names and run by ONNX Runtime.

`source.py` takes a file into a model's folder and tries it; `backbone.py` runs it from there.
"""
