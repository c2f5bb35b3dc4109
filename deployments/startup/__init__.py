"""What Python runs in every process of a service, when that starts."""
