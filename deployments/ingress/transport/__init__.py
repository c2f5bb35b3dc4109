"""The way out of an ingress: which replicas there are, the connections to them, and the one to the controller."""
