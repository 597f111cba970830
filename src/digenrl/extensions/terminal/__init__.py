"""What a user sees of a running run: a line every ten seconds."""
