"""Messages between ingresses, replicas and the controller, and their encoding."""
