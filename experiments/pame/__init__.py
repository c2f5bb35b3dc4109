"""What PAME says of exits in vision models, tried: its search, its estimates, and what exits cost."""
