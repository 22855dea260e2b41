"""What needs real processes: how runs end, and long runs."""
