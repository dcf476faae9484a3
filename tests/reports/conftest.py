"""Runs written by hand have no vocabulary, as older ones: their labels are those of the methods registered here."""

import archipelago.strategies  # noqa: F401
