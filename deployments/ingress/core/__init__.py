"""An ingress's decisions about inputs: admission, calls, retries, probes and outcomes, without network or clock."""
