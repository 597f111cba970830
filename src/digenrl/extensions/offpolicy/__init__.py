"""Off-policy corrections: surrogates that weigh stale samples."""
