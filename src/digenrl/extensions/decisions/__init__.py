"""What each rank's scheduling policy was told and decided, on disk (I13)."""
