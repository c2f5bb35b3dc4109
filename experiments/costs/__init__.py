"""What a service costs beside its models, by part: processor time, memory, bytes."""
