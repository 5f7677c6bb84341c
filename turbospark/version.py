"""The version, in one place; CHANGELOG.md is held against it by a test."""

__version__ = "0.1.0"
