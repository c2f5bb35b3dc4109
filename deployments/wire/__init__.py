"""What ingress, replicas and controller say to each other, and how it is encoded."""
