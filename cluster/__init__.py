"""Where: accelerator types and what a replica on one asks of the cluster."""
