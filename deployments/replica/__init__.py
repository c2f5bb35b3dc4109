"""A replica: the batch engine on one device, behind a port that ingresses call."""
