"""Bench ``elastic``: what a killed rank costs the others, beside torch elastic and torchft."""
