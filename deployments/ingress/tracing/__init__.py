"""Traces of requests: what an ingress notes of those that are sampled, spans made of it afterwards, OpenTelemetry."""
