"""What one module promises."""
