"""TCB's circumstances (ICPP'22, section 6): lengths, batching schemes, what their batches take, one device."""
