"""Sinks for monitor reports: console, JSON lines, TensorBoard, or a user's function."""
