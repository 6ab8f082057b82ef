"""Backstay beside other formats and frameworks."""
