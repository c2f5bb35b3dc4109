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
ALONE = {
    # Ten times a second, how busy a node is.
    "RAY_raylet_report_resources_period_milliseconds": "1000",
    "RAY_gcs_pull_resource_loads_period_milliseconds": "10000",
    "RAY_memory_monitor_refresh_ms": "1000",
    # Of calls that Ray itself carries, which are few.
    "RAY_task_events_report_interval_ms": "0",
    # Every worker looks for signals a hundred times a second, and notes how long that took.
    "RAY_event_stats": "0",
}
"""Read where Ray starts as well: what nodes tell each other, and nobody asks for where there is one."""
QUIET = {
    # Every reader of the metrics sees what Ray exports, every 10 s.
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "5000",
    # Of all controllers' work most is looking whether something has changed.
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
    # A line per request, which Serve reads to count what ingresses count themselves.
    "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
    "RAY_SERVE_EVENT_LOOP_MONITORING_INTERVAL_S": "30",
    # Of processors, memory and disks, for Ray's dashboard.
    "REPORTER_UPDATE_INTERVAL_MS": "30000",
}
"""What Serve and Ray do in a service that nobody asks, less often."""
HAPROXY = {"RAY_SERVE_ENABLE_HA_PROXY": "1"}
# HAProxy's own pages, beside the port that is served.
HAPROXY_PORTS = {"RAY_SERVE_HAPROXY_STATS_PORT": 8404, "RAY_SERVE_HAPROXY_METRICS_PORT": 9101}
# A proxy behind HAProxy, for as long as no ingress is there.
HAPROXY_GRPC_PORTS = {"RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": 9500}
