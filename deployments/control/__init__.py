"""The controller: collects what a service does, plans anew, and changes over without losing a request."""
