"""What a user sees of a running run: a live view on a terminal, else a line every ten seconds."""
