"""Measurements and programs that show tileattn at work; not part of the installed package."""
