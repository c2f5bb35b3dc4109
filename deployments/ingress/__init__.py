"""The ingress: HTTP in, batches out to the stages, answers back."""
