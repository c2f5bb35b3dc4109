"""The batch engine alone on a GPU: without ray, without a service, with whatever a bare machine with torch has."""
