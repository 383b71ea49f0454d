"""Worlds: process groups for tests."""
