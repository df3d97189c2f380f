"""Measuring on one machine what would run on many: virtual devices and links."""
