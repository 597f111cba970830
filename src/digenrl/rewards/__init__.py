"""Rewards: the scorer protocol, mixtures, asynchronous scoring, the HTTP client and server, hacking
alarms."""
