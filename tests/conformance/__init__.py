"""What every plug-in of a registry promises, on every transport."""
