"""The Ray Serve application: ingress, replicas, controller and their messages. No other product folder needs Ray."""
