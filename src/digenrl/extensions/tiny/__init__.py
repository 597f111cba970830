"""Tiny builds: small random models of every family, for tests and first tries without downloads."""
