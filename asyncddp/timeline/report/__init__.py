"""Report of a timeline: how each rank spends its time, and which ranks wait for which."""
