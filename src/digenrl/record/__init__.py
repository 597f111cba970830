"""Files that a run writes: its directory, events and spans. All rooms write here; `digenrl.report`
reads."""
