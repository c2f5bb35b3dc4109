"""The `sitecustomize` module that Python runs when a process of a service starts."""
