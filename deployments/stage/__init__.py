"""A stage's replica: the batch engine on one device, behind a streamed call."""
