"""Report of a timeline: each rank's time by activity, and its waits for other ranks."""
