"""Report of a timeline: where each rank's time goes, and which ranks wait for which."""
