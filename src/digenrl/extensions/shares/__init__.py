"""`schedule.shares=measured`: the shares of the trainers follow their measured speed."""
