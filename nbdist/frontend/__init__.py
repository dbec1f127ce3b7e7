"""Magics and what they show."""
