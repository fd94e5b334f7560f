"""Reads tables and constraints from files."""
