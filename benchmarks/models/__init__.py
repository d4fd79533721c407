"""Real models end to end, with tileattn as their attention."""
