"""What several hosts need: a doctor who looks at them, and elastic jobs."""
