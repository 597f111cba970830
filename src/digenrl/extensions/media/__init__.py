"""Samples as files that people open: pictures and videos."""
