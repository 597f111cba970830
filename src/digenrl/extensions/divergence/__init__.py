"""How far a policy has moved from its base model (`callbacks.evaluation.kl_samples`)."""
