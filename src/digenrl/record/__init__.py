"""What a run writes: its directory, events, spans. Everyone writes here; `digenrl.report` reads."""
