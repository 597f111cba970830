"""Generation: encode, sample, decode, score."""
