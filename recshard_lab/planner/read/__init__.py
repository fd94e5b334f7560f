"""Reads tables and constraints from files and from modules."""
