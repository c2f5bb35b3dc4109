"""Ray's and Serve's own switches.

They are read when ray.serve is imported, here and in every replica, so they are set before.
"""

from __future__ import annotations

THROUGHPUT = {
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    # A replica that says it is broken must not drain for 20 s with calls open.
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
    # Our own lines are few, warnings and errors: they are written at once, not when a thousand have gathered.
    "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1",
}
RAYLET = {"RAY_worker_niceness": "0"}
"""Read where Ray itself starts. Its default of 15 has whatever else happens on the machine come before the model."""
HAPROXY = {"RAY_SERVE_ENABLE_HA_PROXY": "1"}
# HAProxy's own pages, beside the port that is served.
HAPROXY_PORTS = {"RAY_SERVE_HAPROXY_STATS_PORT": 8404, "RAY_SERVE_HAPROXY_METRICS_PORT": 9101}
# A proxy behind HAProxy, for as long as no ingress is there.
HAPROXY_GRPC_PORTS = {"RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": 9500}
