"""``methods``: each method held to its theory and to published figures, on virtual ranks."""
